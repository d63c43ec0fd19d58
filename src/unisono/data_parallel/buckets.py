"""Which parameters share a gradient bucket: pure arithmetic over sizes and kinds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

FIRST_BYTES = 1 << 20
"""The first bucket is full at this size, so that the first message starts early in backward."""


@dataclass(frozen=True)
class Bucket:
    """What one bucket holds, for display and tests."""

    index: int
    """Number of the bucket: the order in which buckets travel."""
    dtype: torch.dtype
    """Dtype of its gradients."""
    device: torch.device
    """Where it lies."""
    numel: int
    """Gradient elements in it."""
    names: tuple[str, ...]
    """Its parameters, last registered first."""


def plan_buckets(
    sizes: Sequence[tuple[int, object]], largest_bytes: float, first_bytes: float = FIRST_BYTES
) -> list[list[int]]:
    """Return which parameters share a bucket, as lists of indices.

    Parameters are taken from the last to the first, about the order in which backward reaches
    them. A parameter is never split; one that is larger than a bucket gets its own. The first
    bucket is closed by the parameter that fills it: a large one leaves with the small ones before
    it, instead of waiting for those behind it.

    Args:
        sizes: bytes of each parameter and what must not be mixed (its device and dtype).
        largest_bytes: a bucket is closed before it grows beyond this.
        first_bytes: the first bucket is closed when it has reached this.

    >>> plan_buckets([(4, "a"), (4, "a"), (4, "b"), (5, "a"), (1, "a")], 8, 2)
    [[4, 3], [2], [1, 0]]
    """
    buckets: list[list[int]] = []
    open_buckets: dict[object, tuple[list[int], float]] = {}
    for index in range(len(sizes) - 1, -1, -1):
        nbytes, kind = sizes[index]
        members, filled = open_buckets.get(kind, ([], 0.0))
        is_full = bool(members) and members is buckets[0] and filled >= first_bytes
        if not members or is_full or filled + nbytes > largest_bytes:
            members, filled = [], 0.0
            buckets.append(members)
        members.append(index)
        open_buckets[kind] = members, filled + nbytes
    return buckets
