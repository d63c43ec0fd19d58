"""What users hand to the verbs: tensors, numpy arrays, and `(buffer, counts, displs)`.

Buffers are taken as tensors over the same memory. They may lie on any device, with any strides;
transfers happen on the device of the group, and results are copied to where they belong.

Also the arithmetic of shares: every rank has `n // size` rows, the first `n % size` ranks one more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unisono.comm.arguments import check_sizes, split_evenly
from unisono.comm.mpi_style.constants import InPlace
from unisono.errors import MeshError, PartitionError, an, explain
from unisono.expect import expect, expect_int, is_integer

Buffer = Tensor | np.ndarray
"""What a verb sends from or receives into."""
Counted = Buffer | tuple[Any, ...] | list[Any]
"""A buffer, `(buffer, counts, displs)` or `(buffer, (counts, displs))`."""
Sent = Buffer | InPlace
"""A buffer to send from, or `IN_PLACE`."""


def check_axis(axis: int, dims: int, verb: str, what: str = "axis") -> int:
    """Return `axis` counted from the front."""
    expect(what, axis, int)
    if not -dims <= axis < dims:
        raise PartitionError.because(
            f"{verb}({what}={axis})",
            f"{dims} dims",
            f"-{dims} <= {axis} < {dims} does not hold",
            f"{what}={dims - 1} is the last one" if dims else "an array with at least one dim",
        )
    return axis % dims


def chunk(
    shape: Sequence[int] | int, split: int | None, rank: int, size: int
) -> tuple[int, tuple[int, ...], tuple[slice, ...]]:
    """Return offset, local shape and slices of what `rank` of `size` holds.

    >>> chunk((7, 2), 0, 1, 3)
    (3, (2, 2), (slice(3, 5, None), slice(0, 2, None)))
    """
    whole = (shape,) if is_integer(shape) else tuple(int(n) for n in shape)
    slices = [slice(0, n) for n in whole]
    if split is None:
        return 0, whole, tuple(slices)
    axis = check_axis(split, len(whole), "chunk", "split")
    expect_int("rank", rank, 0, size, error=MeshError)
    counts, displs = counts_displs(whole[axis], size)
    slices[axis] = slice(displs[rank], displs[rank] + counts[rank])
    return displs[rank], (*whole[:axis], counts[rank], *whole[axis + 1 :]), tuple(slices)


def counts_displs(n: int, size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return how many of `n` rows each rank holds, and where its first one is.

    >>> counts_displs(7, 3)
    ((3, 2, 2), (0, 3, 5))
    """
    counts = split_evenly(n, size)
    return counts, _displacements(counts)


def _displacements(counts: Sequence[int]) -> tuple[int, ...]:
    return tuple(accumulate(counts[:-1], initial=0))


def as_tensor(buffer: object, verb: str, what: str) -> Tensor:
    """Return a buffer as a detached tensor over the same memory."""
    if isinstance(buffer, Tensor) and buffer.layout is torch.strided and not buffer.is_quantized:
        return buffer.detach() if buffer.requires_grad else buffer
    hint = "numbers or bool"
    if isinstance(buffer, np.ndarray):
        is_backwards = any(step < 0 for step in buffer.strides)
        if is_backwards or not buffer.flags.writeable:
            if what != "sendbuf":
                raise PartitionError.because(
                    f"{verb}: {what}",
                    "a numpy array that is read-only or runs backwards",
                    f"strides {buffer.strides}, writeable {buffer.flags.writeable}",
                    "np.empty_like(a), and assign it afterwards",
                )
            buffer = buffer.copy()
        with contextlib.suppress(TypeError):
            return torch.from_numpy(buffer)
        problem = f"a numpy array of {buffer.dtype}"
    elif isinstance(buffer, Tensor):
        problem, hint = "a sparse or quantised tensor", "x.to_dense()"
    else:
        problem = an(type(buffer).__name__)
        hint = f"a tensor or a numpy array ({verb.lower()} takes Python objects)"
    raise TypeError(explain(f"{verb}: {what}", problem, None, hint))


@dataclass(frozen=True)
class Blocks:
    """A buffer cut into one block per rank, along an axis."""

    tensor: Tensor
    axis: int
    counts: tuple[int, ...]
    displs: tuple[int, ...]

    def block(self, rank: int) -> Tensor:
        """Return the view on the block of `rank`."""
        return self.tensor.narrow(self.axis, self.displs[rank], self.counts[rank])

    def fill(self, joined: Tensor) -> None:
        """Write blocks that follow each other in `joined` to their places."""
        for rank, part in enumerate(joined.split(list(self.counts), self.axis)):
            assign(self.block(rank), part)

    def numels(self) -> list[int]:
        """Return the number of elements of each block."""
        length = self.tensor.shape[self.axis]
        row = self.tensor.numel() // length if length else 0
        return [count * row for count in self.counts]


def unpack_counts(
    buffer: Counted, verb: str, what: str
) -> tuple[Tensor, Sequence[int] | None, Sequence[int] | None]:
    """Return buffer, counts and displacements; None for what was not given."""
    if not isinstance(buffer, (tuple, list)):
        return as_tensor(buffer, verb, what), None, None
    if len(buffer) not in (2, 3):
        raise TypeError(
            explain(f"{verb}: {what}", f"{len(buffer)} parts", None, "(buffer, counts, displs)")
        )
    parts: list[Any] = [*buffer, None]
    x, counts, displs = parts[:3]
    if len(buffer) == 2 and len(counts) == 2 and isinstance(counts[0], (tuple, list)):
        counts, displs = counts
    return as_tensor(x, verb, what), counts, displs


def cut(
    x: Tensor,
    axis: int,
    counts: Sequence[int],
    displs: Sequence[int] | None,
    size: int,
    verb: str,
    what: str,
) -> Blocks:
    """Return `x` cut into blocks that lie within it."""
    lengths = check_sizes(counts, size, verb, what=f"{what} counts")
    begins = _displacements(lengths) if displs is None else tuple(int(n) for n in displs)
    ends = [begin + length for begin, length in zip(begins, lengths, strict=False)]
    if len(begins) != size or min(begins) < 0 or max(ends) > x.shape[axis]:
        raise PartitionError.because(
            f"{verb}: {what} counts={list(lengths)}, displs={list(begins)}",
            f"{x.shape[axis]} rows along axis {axis} for the blocks of {size} ranks",
            f"blocks end at {ends}: {max(ends)} > {x.shape[axis]}, or begin before 0",
            "counts, displs, _ = comm.counts_displs_shape(shape, axis)",
        )
    return Blocks(x, axis, lengths, begins)


def equal_share(x: Tensor, axis: int, size: int, verb: str) -> int:
    """Return the rows of each of `size` equal blocks of `x`; refuse rows that do not divide."""
    rows = x.shape[axis]
    if rows % size:
        raise PartitionError.because(
            f"{verb} of {rows} rows in equal shares",
            f"{size} ranks",
            f"{rows} % {size} = {rows % size}",
            f"{verb}v with counts: comm.counts_displs_shape(shape, axis)",
        )
    return rows // size


def check_alike(send: Tensor, recv: Tensor, verb: str, times: int | None = 1) -> None:
    """Refuse buffers of unlike dtypes, or of which one cannot hold `times` the other."""
    request = f"{verb} of {list(send.shape)} ({send.dtype}) into {list(recv.shape)} ({recv.dtype})"
    if send.dtype != recv.dtype:
        raise PartitionError.because(request, "the buffers differ in dtype", None, "one dtype")
    if times is not None and send.numel() * times != recv.numel():
        factor = f"{times} * {send.numel()} = {times * send.numel()}" if times > 1 else send.numel()
        raise PartitionError.because(
            request,
            f"the receive buffer has {recv.numel()} elements",
            f"{factor} != {recv.numel()}",
            "a receive buffer for what all ranks send" if times > 1 else "buffers of one size",
        )


def check_shape(recv: Tensor, expected: Sequence[int], request: str) -> None:
    """Refuse a receive buffer that does not have the shape of what comes."""
    if list(recv.shape) != list(expected):
        raise PartitionError.because(
            f"{request} into {list(recv.shape)}",
            f"{list(expected)} comes",
            f"{list(recv.shape)} != {list(expected)}",
            f"torch.empty({list(expected)})",
        )


def assign(target: Tensor, values: Tensor) -> None:
    """Write `values` to `target`, whatever its strides and device; shapes may differ in form."""
    target.copy_(values if values.shape == target.shape else values.reshape(target.shape))
