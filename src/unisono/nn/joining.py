"""`Join`: where a split network goes on with whole samples."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from unisono.nn.planned import PlannedModule
from unisono.nn.structure import Cuts, Table
from unisono.operators import Repartition
from unisono.operators.gather import concat_replicated, slice_replicated
from unisono.operators.repartition import RepartitionOnGroup
from unisono.topology import Partition
from unisono.topology.decompose import split_cuts
from unisono.topology.overlap import OverlapPlan, overlaps


class Join(PlannedModule[tuple[Cuts, OverlapPlan | None]]):
    """Turn blocks into whole samples: all of them on every rank, or each rank its own.

    Args:
        P_x: partition of the input.
        everyone: all ranks of the network; those outside of `P_x` hold the same in other such
            partitions.
        cuts_batch: re-cut by samples instead of gathering on every rank.
    """

    def __init__(self, P_x: Partition, everyone: Partition, *, cuts_batch: bool) -> None:
        super().__init__()
        self.P_x = P_x
        self.everyone = everyone
        self.cuts_batch = cuts_batch

    def _describe(self) -> tuple[object, ...]:
        return (self.P_x.shape, self.everyone, self.cuts_batch)

    def _make_plan(self, tables: Sequence[Table]) -> tuple[Cuts, OverlapPlan | None]:
        (table,) = tables
        table.dtype(self.P_x)
        cuts = table.cuts(self.P_x)
        if not self.cuts_batch or self.P_x.size < self.everyone.size:
            return cuts, None
        samples, *rest = (own[-1] for own in cuts)  # fewer than ranks: some get none
        by_batch = [split_cuts(samples, self.P_x.size), *((0, size) for size in rest)]
        me = self.P_x.root.rank
        return cuts, overlaps(cuts, self.P_x.ranks, by_batch, self.P_x.ranks, me)

    def forward(self, input: Tensor) -> Tensor:
        """Return whole samples."""
        if not self._takes_part:
            return self._outside(input)
        cuts, overlap = self._plan
        tied = self._tied(input)
        if overlap is not None:
            after = overlap.dest_shape or (0,)
            plan = RepartitionOnGroup(self.P_x.root, overlap, tuple(input.shape), after)
            return Repartition.apply(tied, plan)
        y = tied
        for axis in reversed(range(self.P_x.dim)):
            if self.P_x.shape[axis] > 1:
                sizes = [b - a for a, b in pairwise(cuts[axis])]
                y = concat_replicated(y, axis, sizes, comm=self.P_x.sub(axis).comm)
        return slice_replicated(y, 0, comm=self.everyone.comm) if self.cuts_batch else y
