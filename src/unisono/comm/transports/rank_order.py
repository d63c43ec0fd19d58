"""Reduction of blocks of numbers in rank order: the same bits wherever it is done.

Blocks are numpy arrays, because a numpy call costs a third of a torch call on small blocks and
frees the GIL on large ones. 16-bit floats are added in float32 by torch and rounded once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unisono.comm.reductions import check_op
from unisono.errors import UnisonoError

Array = np.ndarray[Any, Any]

OPS: tuple[str, ...] = ("sum", "product", "min", "max", "and", "or", "xor", "sum64", "mean")
"""Reductions by the number under which they travel. Append only."""

_UFUNCS: dict[str, Callable[..., Any]] = {
    "sum": np.add,
    "sum64": np.add,
    "mean": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
_BOOL_UFUNCS: dict[str, Callable[..., Any]] = {
    "sum": np.logical_or,
    "max": np.logical_or,
    "or": np.logical_or,
    "product": np.logical_and,
    "min": np.logical_and,
    "and": np.logical_and,
    "xor": np.logical_xor,
}
_HALVES = (torch.float16, torch.bfloat16)
_STORAGE: dict[torch.dtype, np.dtype[Any]] = {
    torch.float16: np.dtype(np.int16),
    torch.bfloat16: np.dtype(np.int16),
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.int8: np.dtype(np.int8),
    torch.int16: np.dtype(np.int16),
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
    torch.uint8: np.dtype(np.uint8),
    torch.uint16: np.dtype(np.uint16),
    torch.uint32: np.dtype(np.uint32),
    torch.uint64: np.dtype(np.uint64),
    torch.bool: np.dtype(np.bool_),
    torch.complex64: np.dtype(np.complex64),
    torch.complex128: np.dtype(np.complex128),
}


class Reducer:
    """One reduction of one dtype.

    Attributes:
        number: place of the reduction in `OPS`.
        storage: how numpy sees the elements (16-bit floats as their bits).
    """

    def __init__(self, dtype: torch.dtype, op: str) -> None:
        check_op(op, dtype)
        if dtype not in _STORAGE:
            raise UnisonoError.because(
                f"reduction {op!r} of {str(dtype).removeprefix('torch.')}",
                "this dtype can be moved but not reduced",
                None,
                "convert the tensor first",
            )
        self.number = OPS.index(op)
        self.storage = _STORAGE[dtype]
        self._dtype = dtype
        self._op = op
        self._combine = _BOOL_UFUNCS[op] if dtype == torch.bool else _UFUNCS[op]
        self._is_half = dtype in _HALVES
        self._is_wide = op == "sum64" and dtype == torch.float32

    def array(self, x: Tensor) -> Array:
        """Return the elements of a contiguous, detached tensor as a flat array on its memory."""
        return (x.view(torch.int16) if self._is_half else x).numpy().reshape(-1)

    def fill(self, out: Array, parts: Sequence[Array]) -> None:
        """Write the reduction of `parts`, first to last, to `out`.

        `out` may be the memory of the first or of the second part, but of no other. Overflow gives
        inf and inf - inf gives nan in silence, as in torch: loss scaling lives on it.
        """
        with np.errstate(all="ignore"):
            self._fill(out, parts)

    def _fill(self, out: Array, parts: Sequence[Array]) -> None:
        if self._is_half:
            self._fill_half(out, parts)
        elif self._is_wide:
            self._fill_wide(out, parts)
        elif len(parts) == 1:
            np.copyto(out, parts[0])
        else:
            combine = self._combine
            combine(parts[0], parts[1], out=out)
            for part in parts[2:]:
                combine(out, part, out=out)
            if self._op == "mean":
                np.divide(out, len(parts), out=out)

    def _fill_wide(self, out: Array, parts: Sequence[Array]) -> None:
        total = parts[0].astype(np.float64)
        for part in parts[1:]:
            np.add(total, part, out=total)
        np.copyto(out, total, casting="same_kind")

    def _fill_half(self, out: Array, parts: Sequence[Array]) -> None:
        blocks = [torch.from_numpy(part).view(self._dtype) for part in parts]
        target = torch.from_numpy(out).view(self._dtype)
        if self._op in ("min", "max"):
            pick = torch.minimum if self._op == "min" else torch.maximum
            best = blocks[0].clone()
            for block in blocks[1:]:
                pick(best, block, out=best)
            target.copy_(best)
            return
        total = blocks[0].to(torch.float64 if self._op == "sum64" else torch.float32)
        for block in blocks[1:]:
            if self._op == "product":
                total.mul_(block)
            else:
                total.add_(block)
        if self._op == "mean":
            total.div_(len(parts))
        target.copy_(total)


@functools.cache
def reducer(dtype: torch.dtype, op: str) -> Reducer:
    """Return the reduction `op` of `dtype`; raises `UnisonoError` where it is not defined."""
    return Reducer(dtype, op)
