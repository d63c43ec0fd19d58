"""Joining many small all-reduces into few: latency is paid once for all of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor


class Coalescer:
    """Holds all-reduces until the end of a `with comm.coalesce():` block.

    Args:
        max_bytes: tensors above this many bytes are not held; no joined buffer exceeds it.
        reduce_: does one all-reduce in place.
    """

    def __init__(self, max_bytes: int, reduce_: Callable[[Tensor, str], None]) -> None:
        self.max_bytes = max_bytes
        self._reduce = reduce_
        self._held: dict[tuple[str, torch.dtype], list[Tensor]] = defaultdict(list)
        self._after: list[Callable[[], object]] = []

    def takes(self, x: Tensor) -> bool:
        """Whether `x` is small enough to be held."""
        return x.numel() * x.element_size() <= self.max_bytes

    def hold(self, x: Tensor, op: str, after: Callable[[], object]) -> None:
        """Reduce the contiguous `x` in place at the end, then call `after`."""
        self._held[op, x.dtype].append(x)
        self._after.append(after)

    def flush(self) -> None:
        """Do what is held: one all-reduce per (op, dtype) and `max_bytes`."""
        for (op, _), tensors in self._held.items():
            for batch in self._batches(tensors):
                if len(batch) == 1:
                    self._reduce(batch[0], op)
                    continue
                flat = torch.cat([x.reshape(-1) for x in batch])
                self._reduce(flat, op)
                for x, part in zip(batch, flat.split([x.numel() for x in batch]), strict=True):
                    x.view(-1).copy_(part)
        self._held.clear()
        after, self._after = self._after, []
        for step in after:
            step()

    def _batches(self, tensors: list[Tensor]) -> list[list[Tensor]]:
        batches: list[list[Tensor]] = [[]]
        filled = 0
        for x in tensors:
            nbytes = x.numel() * x.element_size()
            if batches[-1] and filled + nbytes > self.max_bytes:
                batches.append([])
                filled = 0
            batches[-1].append(x)
            filled += nbytes
        return batches
