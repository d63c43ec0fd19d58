"""Long lists of integers: sorted, marked, digested, in as few passes and bytes as they need.

numpy sorts and finds marks several times quicker than torch, but sees no tensor of `torch.func`
and none of a device: there torch does it, with the same result.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from unisono.torch_private import transforms_active

CHUNK = 1 << 17
"""Entries that are worked on at a time: what they pass through stays in a core's cache."""


def smallest_dtype(below: int) -> torch.dtype:
    """Return the smallest dtype that holds the integers from 0 to `below - 1`.

    >>> smallest_dtype(256), smallest_dtype(257), smallest_dtype(100_000)
    (torch.uint8, torch.int16, torch.int32)
    """
    if below <= 1 << 8:
        return torch.uint8
    for dtype in (torch.int16, torch.int32):
        if below <= torch.iinfo(dtype).max + 1:
            return dtype
    return torch.int64


def marked(mask: Tensor) -> Tensor:
    """Return where a mask `[N]` is true, ascending.

    >>> marked(torch.tensor([True, False, True])).tolist()
    [0, 2]
    """
    if _is_seen_by_numpy(mask):
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return mask.nonzero()[:, 0]


def stable_order(keys: Tensor, below: int) -> Tensor:
    """Return the order that sorts keys in `[0, below)`; equal ones stay in theirs.

    >>> stable_order(torch.tensor([2, 0, 2, 1]), 3).tolist()
    [1, 3, 0, 2]
    """
    bits = max(len(keys) - 1, 1).bit_length()
    if not _is_seen_by_numpy(keys) or max(below - 1, 0).bit_length() + bits > 63:
        return keys.sort(stable=True).indices
    # Each key with its place behind it: all differ, so that the quickest sort is a stable one.
    packed = (keys.long() << bits).bitwise_or_(torch.arange(len(keys), device=keys.device))
    packed.numpy().sort()
    return packed.bitwise_and_((1 << bits) - 1)


def distinct(keys: Tensor) -> Tensor:
    """Return each of some keys once, ascending; the list given is sorted in place.

    >>> distinct(torch.tensor([3, 1, 3])).tolist()
    [1, 3]
    """
    if not _is_seen_by_numpy(keys):
        return torch.unique(keys)
    keys.numpy().sort()
    is_first = torch.ones(len(keys), dtype=torch.bool, device=keys.device)
    torch.ne(keys[1:], keys[:-1], out=is_first[1:])
    return keys.index_select(0, marked(is_first))


def counts(values: Tensor, parts: int) -> tuple[int, ...]:
    """Return how often each of the numbers from 0 to `parts - 1` occurs."""
    return tuple(torch.bincount(values, minlength=parts).tolist())


def digest(numbers: Tensor) -> int:
    """Return a number of 62 bits that another list of integers, `[N]` or `[K, N]`, has not.

    Every integer is multiplied by an odd number of its place, so that one that changes is always
    seen; others collide by chance alone.
    """
    total, weights = 0, torch.from_numpy(_weights())
    for row in numbers.cpu() if numbers.dim() == 2 else [numbers.cpu()]:
        for part in row.split(len(weights)):
            weighted = torch.dot(part.long(), weights[: len(part)])
            total = (total * 0x1E3779B97F4A7C15 + int(weighted)) % 2**62
    return total


@cache
def _weights() -> np.ndarray:
    """Return odd numbers without a pattern, the same in every process; no tensor, see above."""
    drawn = np.random.Generator(np.random.PCG64(0)).integers(-(2**63), 2**63 - 1, 1 << 15)
    return drawn | 1


def _is_seen_by_numpy(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and not transforms_active()
