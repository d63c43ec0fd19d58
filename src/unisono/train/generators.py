"""The random generators of this process, all together: those of torch, numpy and Python."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch


def seed_of(*words: object) -> int:
    """Return a seed that depends on all words, and on nothing else."""
    text = "/".join(map(str, words)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def seed_generators(seed: int) -> None:
    """Seed all generators."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def random_states() -> dict[str, Any]:
    """Return the states of all generators."""
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Put all generators into states that `random_states` gave."""
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    np.random.set_state(states["numpy"])
    random.setstate(states["python"])
