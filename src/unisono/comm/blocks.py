"""Blocks of tensors as they travel: bytes, rows, lengths, and what ranks tell of their own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.comm.reductions import DTYPE_NUMBERS, DTYPES
from unisono.errors import PartitionError

_MAX_DIMS = 12


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


def rows_first(x: Tensor, dim: int) -> Tensor:
    """Return `x` detached and contiguous with `dim` in front; a 0-dim tensor is one row."""
    rows = x.detach()
    if rows.dim() == 0:
        rows = rows.reshape(1)
    elif dim:
        rows = rows.movedim(dim, 0)
    if rows.is_contiguous() and not rows.is_conj() and not rows.is_neg():
        return rows
    return dense(rows)


def rows_back(x: Tensor, dim: int) -> Tensor:
    """Undo `rows_first` on a result."""
    return x if dim == 0 else x.movedim(0, dim).contiguous()


def split_evenly(rows: int, parts: int) -> tuple[int, ...]:
    """Return balanced block lengths: the first `rows % parts` blocks have one more."""
    share, rest = divmod(rows, parts)
    return tuple(share + (part < rest) for part in range(parts))


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


def do_not_fit(verb: str, ranks: Sequence[int], records: Sequence[tuple[int, ...]]) -> Exception:
    """Return the error for blocks that cannot be joined, from what each rank has told of its own.

    Args:
        verb: what was to join them.
        ranks: world ranks of the group.
        records: of each, `pack_shape` and the dim.
    """
    lines: list[str] = []
    for rank, record in zip(ranks, records, strict=True):
        shape, dtype = unpack_shape(record[:-1])
        name = str(dtype).removeprefix("torch.")
        lines.append(f"rank {rank}: {name} rows of {list(shape[1:])}, joined along {record[-1]}")
    return PartitionError.because(
        f"{verb} of blocks that do not fit together",
        "\n".join(lines),
        None,
        "blocks may differ only along the joined dim",
    )
