"""The random generators of this process, all together: torch's on CPU and device, numpy, Python."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch

from unisono import accelerator


def seed_of(*words: object) -> int:
    """Return a seed that depends on all words, and on nothing else."""
    text = "/".join(map(str, words)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def seed_generators(seed: int) -> None:
    """Seed all generators."""
    torch.default_generator.manual_seed(seed)
    accelerator.seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def random_states() -> dict[str, Any]:
    """Return the states of all generators; that of the device in use by its kind."""
    device = accelerator.device_in_use()
    return {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
        **({} if device is None else {device.type: accelerator.generator_state(device)}),
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Put all generators into states that `random_states` returned.

    The generator of a device of another kind than theirs stays as it is.
    """
    torch.set_rng_state(states["torch"])
    device = accelerator.current()
    if device is not None and (state := states.get(device.type)) is not None:
        accelerator.set_generator_state(device, state)
    np.random.set_state(states["numpy"])
    random.setstate(states["python"])
