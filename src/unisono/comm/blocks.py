"""Small exchanges that tell ranks what is coming: block lengths, shapes, dtypes.

XXX Tensors as plain bytes: what travels when a tensor is only moved.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.comm.engines.base import Engine
from unisono.comm.reductions import DTYPE_NUMBERS, DTYPES
from unisono.errors import PartitionError, UnisonoError

_MAX_DIMS = 12


def split_evenly(rows: int, parts: int) -> tuple[int, ...]:
    """Return balanced block lengths: the first `rows % parts` blocks have one more."""
    share, rest = divmod(rows, parts)
    return tuple(share + (part < rest) for part in range(parts))


def learn_blocks(
    engine: Engine, rows: Tensor, dim: int, verb: str, ranks: Sequence[int], timeout_s: float
) -> tuple[int, ...]:
    """Exchange block lengths, and refuse alike on all ranks blocks that cannot be joined."""
    mine = (*pack_shape(rows.shape, rows.dtype), dim)
    records = engine.all_gather_ints(mine, timeout_s=timeout_s)
    if any(record[1:] != records[0][1:] for record in records):
        lines: list[str] = []
        for rank, record in zip(ranks, records, strict=True):
            shape, dtype = unpack_shape(record[:-1])
            name = str(dtype).removeprefix("torch.")
            lines.append(
                f"rank {rank}: {name} rows of {list(shape[1:])}, joined along {record[-1]}"
            )
        raise PartitionError.because(
            f"{verb} of blocks that do not fit together",
            "\n".join(lines),
            None,
            "blocks may differ only along the joined dim",
        )
    return tuple(record[0] for record in records)


def describe_block(
    engine: Engine,
    src: int,
    rows: Tensor | None,
    sizes: tuple[int, ...],
    dim: int,
    refused: UnisonoError | None,
    timeout_s: float,
) -> tuple[tuple[int, ...], torch.dtype, tuple[int, ...], int]:
    """Tell all ranks shape, dtype, block lengths and dim of the tensor `src` is about to scatter.

    If `src` refused its arguments, all ranks raise.
    """
    whole = rows if rows is not None else torch.empty(0)
    fields = [int(refused is not None), dim, *sizes, *pack_shape(whole.shape, whole.dtype)]
    record = engine.all_gather_ints(fields, timeout_s=timeout_s)[src]
    if refused is not None:
        raise refused
    if record[0]:
        raise PartitionError.because(
            f"scatter from rank {src} of the group",
            "the source refused its arguments; its own error says why",
        )
    shape, dtype = unpack_shape(record[2 + engine.size :])
    return shape, dtype, tuple(record[2 : 2 + engine.size]), record[1]


def pack_shape(shape: Sequence[int], dtype: torch.dtype) -> tuple[int, ...]:
    """Return shape and dtype as a fixed number of ints, first the length of dim 0."""
    if len(shape) > _MAX_DIMS:
        raise PartitionError.because(
            f"a tensor of {len(shape)} dims", f"at most {_MAX_DIMS} dims travel with their sizes"
        )
    padded = [*shape, *([-1] * (_MAX_DIMS - len(shape)))]
    return (padded[0], DTYPE_NUMBERS[dtype], *padded[1:])


def unpack_shape(record: Sequence[int]) -> tuple[tuple[int, ...], torch.dtype]:
    """Undo `pack_shape`."""
    shape = tuple(n for n in (record[0], *record[2:]) if n >= 0)
    return shape, DTYPES[record[1]]


def bytes_of(x: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor as a flat uint8 view."""
    flat = x.reshape(-1)
    if flat.dtype == torch.uint8:
        return flat
    # A single element may have any stride and still count as contiguous.
    return (flat.as_strided((1,), (1,)) if flat.numel() == 1 else flat).view(torch.uint8)


def dense(x: Tensor) -> Tensor:
    """Return `x` with its values laid out in order; `x` itself where they are."""
    if x.is_contiguous() and not x.is_conj() and not x.is_neg():
        return x
    return x.resolve_conj().resolve_neg().contiguous()
