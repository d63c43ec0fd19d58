"""Who talks to whom in a broadcast or sum-reduce between two partitions.

A function of two shapes and two rank tuples: the smaller side is spread over the larger one as
numpy spreads shapes. No torch and no process here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from unisono.errors import PartitionError
from unisono.topology.decompose import grid_index


class RankGrid(Protocol):
    """Ranks laid out in a row-major grid; `Partition` and `Mesh` are such."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of ranks along each dim."""
        ...

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks in row-major order."""
        ...


class Group(NamedTuple):
    """Ranks that share one block."""

    root: int
    """The rank that holds the block, or gets the sum."""
    members: tuple[int, ...]
    """Ranks of the process group: `root` first, then the peers, none twice."""
    peers: tuple[int, ...]
    """Ranks of the other side: where the block goes, or whose blocks are summed. The root is one
    of them only if its own block stays with it."""


def broadcast_groups(
    src: RankGrid, dest: RankGrid, transpose_src: bool = False, transpose_dest: bool = False
) -> list[Group]:
    """Return, for each source rank in row-major order, who gets its block.

    The source shape is filled up with ones on the left; in each dim it must then be 1 or equal to
    the destination's. `transpose_*` reverses the index of a side; tensors are never transposed.
    The root stands first in `members` even when it does not keep its block.

    >>> from types import SimpleNamespace as L
    >>> broadcast_groups(L(shape=(1, 2), ranks=(4, 5)), L(shape=(2, 2), ranks=(0, 1, 2, 3)))
    [Group(root=4, members=(4, 0, 2), peers=(0, 2)), Group(root=5, members=(5, 1, 3), peers=(1, 3))]
    """
    return _groups("broadcast", src, dest, transpose_src, transpose_dest)


def reduce_groups(
    src: RankGrid, dest: RankGrid, transpose_src: bool = False, transpose_dest: bool = False
) -> list[Group]:
    """Return, for each destination rank in row-major order, whose blocks are summed there.

    The relation of `broadcast_groups` from `dest` to `src`, read backwards.
    """
    return _groups("sum-reduce", dest, src, transpose_dest, transpose_src)


def _groups(
    verb: str, few: RankGrid, many: RankGrid, transpose_few: bool, transpose_many: bool
) -> list[Group]:
    check = getattr(few, "check_same_root", None)
    if check is not None and hasattr(many, "check_same_root"):  # a `Mesh` has no root of its own
        check(many)
    narrow = _turned(few.shape, transpose_few)
    wide = _turned(many.shape, transpose_many)
    missing = len(wide) - len(narrow)
    padded = (1,) * missing + narrow
    call = f"{verb} between partitions of shape {list(few.shape)} and {list(many.shape)}"
    compared = f"compared shapes {list(padded)} and {list(wide)}"
    if missing < 0:
        raise PartitionError.because(
            call,
            compared,
            f"{len(narrow)} dims against {len(wide)}",
            "the side with fewer ranks must not have more dims",
        )
    for dim, (a, b) in enumerate(zip(padded, wide, strict=True)):
        if a not in (1, b):
            raise PartitionError.because(
                call,
                compared,
                f"dim {dim}: {a} against {b}",
                f"1 or {b} there, or a transpose flag",
            )
    matching = [dim for dim, (a, b) in enumerate(zip(padded, wide, strict=True)) if a == b]

    def colour(layout: RankGrid, place: int, transpose: bool) -> tuple[int, ...]:
        index = _turned(grid_index(layout.shape, place), transpose)
        index = (0,) * (len(wide) - len(index)) + index
        return tuple(index[dim] for dim in matching)

    readers: dict[tuple[int, ...], list[int]] = {}
    for place, rank in enumerate(many.ranks):
        readers.setdefault(colour(many, place, transpose_many), []).append(rank)
    groups: list[Group] = []
    for place, root in enumerate(few.ranks):
        peers = tuple(readers[colour(few, place, transpose_few)])
        groups.append(Group(root, (root, *(rank for rank in peers if rank != root)), peers))
    return groups


def _turned(values: Sequence[int], transpose: bool) -> tuple[int, ...]:
    return tuple(reversed(values)) if transpose else tuple(values)
