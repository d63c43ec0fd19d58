"""Joining many small all-reduces into few: latency is paid once for all of them."""

from __future__ import annotations

from bisect import bisect_left
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
        self._begins: list[int] = []
        self._ends: list[int] = []
        """Memory that waits for a result, as addresses: sorted intervals, none over another."""

    def takes(self, x: Tensor) -> bool:
        """Whether `x` is small enough to be held."""
        return x.numel() * x.element_size() <= self.max_bytes

    def settle(self, x: Tensor) -> None:
        """Do what is held if `x` lies in memory that waits for a result: `x` is to be read now."""
        begin, end = _extent(x)
        place = bisect_left(self._ends, begin + 1)  # the first that ends behind `begin`
        if begin < end and place < len(self._begins) and self._begins[place] < end:
            self.flush()

    def hold(self, x: Tensor, op: str, after: Callable[[], object], result: Tensor) -> None:
        """Reduce the contiguous `x` in place at the end, then call `after`, which fills `result`.

        Before, `settle` was called with what `x` was made from.
        """
        self._held[op, x.dtype].append(x)
        self._after.append(after)
        begin, end = _extent(result)
        if begin < end:
            place = bisect_left(self._begins, begin)
            self._begins.insert(place, begin)
            self._ends.insert(place, end)

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
        self._begins.clear()
        self._ends.clear()
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


def _extent(x: Tensor) -> tuple[int, int]:
    """Return the addresses between which the elements of `x` lie."""
    begin = x.data_ptr()
    if not x.numel():
        return begin, begin
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return begin, begin + (last + 1) * x.element_size()
