"""What users hand to the verbs: tensors, numpy arrays, and `(buffer, counts, displs)`.

Buffers are taken as tensors over the same memory. They may lie on any device, with any strides;
transfers happen on the device of the group, and results are copied to where they belong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unisono.comm.arguments import check_sizes
from unisono.comm.mpi_style.chunking import displacements
from unisono.errors import PartitionError, an, explain

Buffer = Tensor | np.ndarray
"""What a verb sends from or receives into."""
Counted = Buffer | tuple[Any, ...] | list[Any]
"""A buffer, `(buffer, counts, displs)` or `(buffer, (counts, displs))`."""


def as_tensor(buffer: object, verb: str, what: str) -> Tensor:
    """Return a buffer as a detached tensor over the same memory."""
    if isinstance(buffer, Tensor):
        if buffer.layout is not torch.strided or buffer.is_quantized:
            raise TypeError(
                explain(f"{verb}: {what}", "a sparse or quantised tensor", None, "x.to_dense()")
            )
        return buffer.detach() if buffer.requires_grad else buffer
    if isinstance(buffer, np.ndarray):
        return _from_numpy(buffer, verb, what)
    raise TypeError(
        explain(
            f"{verb}: {what}",
            an(type(buffer).__name__),
            None,
            f"a tensor or a numpy array ({verb.lower()} takes Python objects)",
        )
    )


def _from_numpy(array: np.ndarray, verb: str, what: str) -> Tensor:
    if any(step < 0 for step in array.strides) or not array.flags.writeable:
        if what != "sendbuf":
            raise PartitionError.because(
                f"{verb}: {what}",
                "a numpy array that is read-only or runs backwards",
                f"strides {array.strides}, writeable {array.flags.writeable}",
                "np.empty_like(a), and assign it afterwards",
            )
        array = array.copy()
    try:
        return torch.from_numpy(array)
    except TypeError:
        raise TypeError(
            explain(f"{verb}: {what}", f"a numpy array of {array.dtype}", None, "numbers or bool")
        ) from None


@dataclass(frozen=True)
class Blocks:
    """A buffer cut in one block a rank, along an axis."""

    tensor: Tensor
    axis: int
    counts: tuple[int, ...]
    displs: tuple[int, ...]

    def block(self, rank: int) -> Tensor:
        """Return the view on the block of `rank`."""
        return self.tensor.narrow(self.axis, self.displs[rank], self.counts[rank])

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
    counts: Any = None
    displs: Any = None
    if len(buffer) == 3:
        counts, displs = buffer[1:]
    elif len(buffer) == 2:
        counts = buffer[1]
        is_pair = len(counts) == 2 and isinstance(counts[0], (tuple, list))
        if is_pair:
            counts, displs = counts
    else:
        raise TypeError(
            explain(f"{verb}: {what}", f"{len(buffer)} parts", None, "(buffer, counts, displs)")
        )
    return as_tensor(buffer[0], verb, what), counts, displs


def cut(
    x: Tensor,
    axis: int,
    counts: Sequence[int],
    displs: Sequence[int] | None,
    size: int,
    verb: str,
    what: str,
) -> Blocks:
    """Return `x` cut in blocks that lie within it."""
    lengths = check_sizes(counts, size, verb, what=f"{what} counts")
    begins = displacements(lengths) if displs is None else tuple(int(n) for n in displs)
    rows = x.shape[axis]
    if len(begins) != size:
        raise PartitionError.because(
            f"{verb}: {what} displs={list(begins)}",
            f"{len(begins)} entries for {size} ranks",
            f"{len(begins)} != {size}",
        )
    for rank, (begin, length) in enumerate(zip(begins, lengths, strict=True)):
        if begin < 0 or begin + length > rows:
            raise PartitionError.because(
                f"{verb}: {what} counts={list(lengths)}, displs={list(begins)}",
                f"{rows} rows along axis {axis}, and the block of rank {rank} does not lie in them",
                f"{begin} + {length} = {begin + length} > {rows}" if begin >= 0 else f"{begin} < 0",
                "counts, displs, _ = comm.counts_displs_shape(shape, axis)",
            )
    return Blocks(x, axis, lengths, begins)


def check_alike(send: Tensor, recv: Tensor, verb: str, times: int = 1) -> None:
    """Refuse buffers of which one cannot hold `times` the other."""
    if send.dtype != recv.dtype:
        raise PartitionError.because(
            f"{verb} of {send.dtype} into {recv.dtype}",
            "the buffers differ in dtype",
            None,
            f"torch.empty(..., dtype={send.dtype})",
        )
    if send.numel() * times != recv.numel():
        factor = f"{times} * {send.numel()} = {times * send.numel()}" if times > 1 else send.numel()
        raise PartitionError.because(
            f"{verb} of {list(send.shape)} into {list(recv.shape)}",
            f"the receive buffer has {recv.numel()} elements",
            f"{factor} != {recv.numel()}",
            "a receive buffer for what all ranks send" if times > 1 else "buffers of one size",
        )


def assign(target: Tensor, values: Tensor) -> None:
    """Write `values` to `target`, whatever its strides and device; shapes may differ in form."""
    target.copy_(values if values.shape == target.shape else values.reshape(target.shape))
