"""The boxes that change hands when a tensor goes from one partition to another.

A function of cuts and rank tuples, so every rank computes its part without a message. No torch and
no process here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from unisono.errors import PartitionError
from unisono.topology.decompose import (
    blocks_over,
    check_cuts,
    flat_index,
    grid_index,
    split_cuts,
)
from unisono.topology.halo import Box


@dataclass(frozen=True, slots=True)
class Move:
    """A box of this rank's block that goes to, or comes from, another rank."""

    peer: int
    """Rank at the other end."""
    box: Box
    """Where in this rank's own block."""


@dataclass(frozen=True, slots=True)
class LocalMove:
    """A box that stays on this rank but changes its place."""

    source: Box
    """Where in this rank's block of the source partition."""
    dest: Box
    """Where in this rank's block of the destination partition."""


@dataclass(frozen=True, slots=True)
class OverlapPlan:
    """What one rank does in a repartition. Ranks are those of the partitions' root communicator."""

    rank: int
    """Own rank."""
    source_shape: tuple[int, ...] | None
    """Sizes of the own block before; None when this rank is not in the source partition."""
    dest_shape: tuple[int, ...] | None
    """Sizes of the own block after; None when this rank is not in the destination partition."""
    sends: tuple[Move, ...]
    """One box for each peer, beginning with the next higher rank, to spread the load."""
    recvs: tuple[Move, ...]
    """One box for each peer, ascending."""
    local: LocalMove | None
    """What stays here, if anything."""

    @property
    def adjoint(self) -> OverlapPlan:
        """The way back: sources and destinations change roles."""
        return OverlapPlan(
            rank=self.rank,
            source_shape=self.dest_shape,
            dest_shape=self.source_shape,
            sends=_spread(self.rank, self.recvs),
            recvs=_ascending(self.sends),
            local=self.local and LocalMove(self.local.dest, self.local.source),
        )

    @property
    def is_identity(self) -> bool:
        """Whether the block after is the block before, on this rank."""
        if self.sends or self.recvs or self.source_shape != self.dest_shape:
            return False
        if self.source_shape is None or 0 in self.source_shape:
            return True
        whole = tuple((0, size) for size in self.source_shape)
        return self.local is not None and self.local.source == whole == self.local.dest


def overlaps(
    src_bounds: Sequence[Sequence[int]],
    src_ranks: Sequence[int],
    dest_bounds: Sequence[Sequence[int]],
    dest_ranks: Sequence[int],
    me: int,
) -> OverlapPlan:
    """Return what rank `me` sends, receives and keeps when a tensor changes its layout.

    Args:
        src_bounds: for each dim, the cuts before.
        src_ranks: ranks of the source partition, row-major.
        dest_bounds: for each dim, the cuts after.
        dest_ranks: ranks of the destination partition, row-major.
        me: the rank whose plan is asked for; it may be in both, one or none of the partitions.

    >>> p = overlaps([(0, 4, 5)], (0, 1), [(0, 3, 5)], (0, 1), me=0)
    >>> p.sends, p.local.dest
    ((Move(peer=1, box=((3, 4),)),), ((0, 3),))
    """
    _check_pair(src_bounds, src_ranks, dest_bounds, dest_ranks)
    source = _own_box(src_bounds, src_ranks, me)
    dest = _own_box(dest_bounds, dest_ranks, me)
    sends = _moves(source, dest_bounds, dest_ranks)
    recvs = _moves(dest, src_bounds, src_ranks)
    kept_from = next((move.box for move in sends if move.peer == me), None)
    kept_to = next((move.box for move in recvs if move.peer == me), None)
    return OverlapPlan(
        rank=me,
        source_shape=_shape(source),
        dest_shape=_shape(dest),
        sends=_spread(me, [move for move in sends if move.peer != me]),
        recvs=_ascending(move for move in recvs if move.peer != me),
        local=None if kept_from is None or kept_to is None else LocalMove(kept_from, kept_to),
    )


def repartition_plan(
    src_bounds: Sequence[Sequence[int]],
    src_ranks: Sequence[int],
    dest_shape: Sequence[int],
    dest_ranks: Sequence[int],
    me: int,
) -> OverlapPlan:
    """Return the plan of rank `me` from any cuts to the balanced blocks of a partition shape.

    A dim of global size 1 must not be split over several destination ranks.
    """
    if len(src_bounds) != len(dest_shape):
        raise PartitionError.because(
            "repartition",
            f"source of {len(src_bounds)} dims, destination shape {list(dest_shape)}",
            f"{len(src_bounds)} != {len(dest_shape)}",
            "partitions of equal length; write 1 where a dim is not split",
        )
    check_cuts(src_bounds)
    for dim, (cuts, parts) in enumerate(zip(src_bounds, dest_shape, strict=True)):
        if cuts[-1] == 1 and parts > 1:
            raise PartitionError.because(
                f"repartition to shape {list(dest_shape)}",
                f"global size 1 in dim {dim}",
                f"1 point over {parts} ranks",
                f"1 in dim {dim} of the destination, or Broadcast to give every rank the point",
            )
    dest_bounds = [
        split_cuts(cuts[-1], parts) for cuts, parts in zip(src_bounds, dest_shape, strict=True)
    ]
    return overlaps(src_bounds, src_ranks, dest_bounds, dest_ranks, me)


def _own_box(bounds: Sequence[Sequence[int]], ranks: Sequence[int], me: int) -> Box | None:
    """Return the block of rank `me` in global coordinates."""
    if me not in ranks:
        return None
    index = grid_index(_grid(bounds), ranks.index(me))
    return tuple((cuts[i], cuts[i + 1]) for cuts, i in zip(bounds, index, strict=True))


def _moves(box: Box | None, bounds: Sequence[Sequence[int]], ranks: Sequence[int]) -> list[Move]:
    """Return the parts of `box` that the other layout's ranks hold, relative to `box`."""
    if box is None:
        return []
    by_dim = [list(blocks_over(cuts, *span)) for span, cuts in zip(box, bounds, strict=True)]
    starts = [start for start, _ in box]
    moves: list[Move] = []
    for combination in product(*by_dim):
        peer = ranks[flat_index(_grid(bounds), [i for i, _, _ in combination])]
        shared = zip(combination, starts, strict=True)
        moves.append(Move(peer, tuple((low - s, high - s) for (_, low, high), s in shared)))
    return moves


def _spread(me: int, moves: Sequence[Move]) -> tuple[Move, ...]:
    """Order by distance upwards from `me`, wrapping around, so that not all call rank 0 first."""
    around = max(me, *(move.peer for move in moves), 0) + 1
    return tuple(sorted(moves, key=lambda move: (move.peer - me) % around))


def _ascending(moves: Iterable[Move]) -> tuple[Move, ...]:
    return tuple(sorted(moves, key=lambda move: move.peer))


def _grid(bounds: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(len(cuts) - 1 for cuts in bounds)


def _shape(box: Box | None) -> tuple[int, ...] | None:
    return None if box is None else tuple(stop - start for start, stop in box)


def _check_pair(
    src_bounds: Sequence[Sequence[int]],
    src_ranks: Sequence[int],
    dest_bounds: Sequence[Sequence[int]],
    dest_ranks: Sequence[int],
) -> None:
    check_cuts(src_bounds)
    check_cuts(dest_bounds)
    before, after = ([cuts[-1] for cuts in bounds] for bounds in (src_bounds, dest_bounds))
    if before != after:
        raise PartitionError.because(
            f"overlap of partitions {list(_grid(src_bounds))} and {list(_grid(dest_bounds))}",
            f"a tensor of {before} points before, of {after} after",
            None,
            "cut the same tensor on both sides, with a partition size for each of its dims",
        )
    sides = ("source", src_bounds, src_ranks), ("destination", dest_bounds, dest_ranks)
    for side, bounds, ranks in sides:
        blocks = math.prod(_grid(bounds))
        if blocks != len(ranks) or len(set(ranks)) != len(ranks):
            raise PartitionError.because(
                f"overlap of two partitions, {side} ranks {list(ranks)}",
                f"cuts for shape {list(_grid(bounds))}",
                f"{blocks} blocks, {len(set(ranks))} different ranks",
                "one rank for each block",
            )
