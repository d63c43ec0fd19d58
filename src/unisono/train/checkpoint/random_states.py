"""The states of the global random generators of a rank: torch, numpy and Python's own."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch


def random_states() -> dict[str, Any]:
    """Return the states of this rank's generators."""
    uses_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if uses_cuda else None,
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Put the generators into states that `random_states` gave."""
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    np.random.set_state(states["numpy"])
    random.setstate(states["python"])


def seed_from(states: dict[str, Any], rank: int) -> None:
    """Seed the generators of a rank that did not exist when the states were saved."""
    text = states["torch"].numpy().tobytes() + str(rank).encode()
    number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
    torch.manual_seed(number)
    np.random.seed(number % 2**32)
    random.seed(number)
