"""Random numbers from a seed and a place: own generators, the global ones are never touched."""

from __future__ import annotations

import hashlib
import secrets

import torch

from unisono.comm import Communicator

__all__ = ["agreed_seed", "generator_of"]


def generator_of(*key: int | str) -> torch.Generator:
    """Return a CPU generator whose stream depends on every part of the key."""
    text = "/".join(map(str, key)).encode()
    number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
    return torch.Generator().manual_seed(number)


def agreed_seed(seed: int | None, comm: Communicator) -> int:
    """Return `seed`, or one that rank 0 draws. Collective over `comm` if it is None."""
    if seed is not None:
        return seed
    return comm.all_gather_ints([secrets.randbits(32)])[0][0]
