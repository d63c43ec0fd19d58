"""Which part of an array a rank holds: pure arithmetic.

Every rank has `n // size` rows, the first `n % size` ranks one more.
"""

from __future__ import annotations

from collections.abc import Sequence

from unisono.comm.blocks import split_evenly
from unisono.errors import MeshError, PartitionError, an, explain

Slices = tuple[slice, ...]


def check_axis(axis: object, dims: int, verb: str, what: str = "axis") -> int:
    """Return `axis` counted from the front."""
    if isinstance(axis, bool) or not isinstance(axis, int):
        raise TypeError(
            explain(f"{verb}({what}={axis!r})", an(type(axis).__name__), None, f"{what}=0")
        )
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
) -> tuple[int, tuple[int, ...], Slices]:
    """Return offset, local shape and slices of what `rank` of `size` holds.

    >>> chunk((7, 2), 0, 1, 3)
    (3, (2, 2), (slice(3, 5, None), slice(0, 2, None)))
    """
    whole = (shape,) if isinstance(shape, int) else tuple(int(n) for n in shape)
    if split is None:
        return 0, whole, tuple(slice(0, n) for n in whole)
    axis = check_axis(split, len(whole), "chunk", "split")
    if not 0 <= rank < size:
        raise MeshError.because(
            f"chunk(rank={rank}, w_size={size})", None, f"0 <= {rank} < {size} does not hold"
        )
    share, rest = divmod(whole[axis], size)
    begin = rank * share + min(rank, rest)
    length = share + (rank < rest)
    local = (*whole[:axis], length, *whole[axis + 1 :])
    slices = tuple(
        slice(begin, begin + length) if dim == axis else slice(0, n) for dim, n in enumerate(whole)
    )
    return begin, local, slices


def counts_displs(n: int, size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return how many of `n` rows each rank holds, and where its first one is.

    >>> counts_displs(7, 3)
    ((3, 2, 2), (0, 3, 5))
    """
    counts = split_evenly(n, size)
    return counts, displacements(counts)


def displacements(counts: Sequence[int]) -> tuple[int, ...]:
    """Return where each block begins when they follow each other."""
    return tuple(sum(counts[:place]) for place in range(len(counts)))
