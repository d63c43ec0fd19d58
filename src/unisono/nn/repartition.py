"""`Repartition`: a tensor moves from the blocks of one partition to those of another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from unisono.comm import Communicator
from unisono.errors import PartitionError
from unisono.nn.planned import PlannedModule, zero_volume
from unisono.nn.structure import Cuts, Table
from unisono.operators import Repartition as RepartitionMap
from unisono.operators.linear import identity
from unisono.operators.plans import Flight
from unisono.operators.repartition import (
    RepartitionOnGroup,
    Stage,
    Staging,
    start_moves,
    starts_for,
)
from unisono.topology import Partition
from unisono.topology.overlap import OverlapPlan, repartition_plan

__all__ = ["DistributedTranspose", "Repartition"]


@dataclass(frozen=True)
class _Moved:
    """What one rank does in a repartition, and the dtype of the data."""

    comm: Communicator
    overlap: OverlapPlan
    dtype: torch.dtype
    stage: Stage | None
    """Shared memory for large blocks, where all ranks have one host."""


class Repartition(PlannedModule[_Moved]):
    """Move a tensor from the blocks of one partition to the balanced blocks of another.

    Args:
        P_x: partition of the input; blocks may be of any size.
        P_y: partition of the output, with as many dims.
        preserve_batch: a rank outside of `P_y` gets shape `(B, 0)` instead of `(0,)`.
    """

    _word_travels = "behind"

    def __init__(self, P_x: Partition, P_y: Partition, preserve_batch: bool = True) -> None:
        super().__init__()
        if P_x.dim != P_y.dim:
            raise PartitionError.because(
                f"Repartition from {P_x!r} to {P_y!r}",
                f"{P_x.dim} and {P_y.dim} dims",
                f"{P_x.dim} != {P_y.dim}",
                "partitions of equal length; write 1 where a dim is not split",
            )
        P_x.check_same_root(P_y)
        self.P_x = P_x
        self.P_y = P_y
        self.preserve_batch = preserve_batch
        self._staging: Staging | None = None

    def _describe(self) -> tuple[object, ...]:
        return (self.P_x, self.P_y, self.preserve_batch)

    def _make_plan(self, tables: Sequence[Table]) -> _Moved:
        (table,) = tables
        cuts = table.cuts(self.P_x)
        dtype = table.dtype(self.P_x)
        root = self.P_x.root
        stage = self._stage_for(cuts, dtype)
        return _Moved(root, self._overlap_of(root.rank, cuts), dtype, stage)

    def _overlap_of(self, rank: int, cuts: Cuts) -> OverlapPlan:
        return repartition_plan(cuts, self.P_x.ranks, self.P_y.shape, self.P_y.ranks, rank)

    def _stage_for(self, cuts: Cuts, dtype: torch.dtype) -> Stage | None:
        """Return shared memory to hand blocks over in, if there is any. Collective."""
        comm = self._agreeing
        if comm is None or self.P_x == self.P_y:
            return None
        before = prod(max(b - a for a, b in pairwise(own)) for own in cuts)
        after = prod(-(-own[-1] // n) for own, n in zip(cuts, self.P_y.shape, strict=True))
        nbytes = max(before, after) * dtype.itemsize
        if self._staging is None or self._staging.nbytes < nbytes:
            self._staging = Staging.of(comm, nbytes)
        if self._staging is None:
            return None
        me = self.P_x.root.rank
        own = self._overlap_of(me, cuts)
        plans = {move.peer: self._overlap_of(move.peer, cuts) for move in (*own.sends, *own.recvs)}
        return Stage(
            self._staging,
            {rank: place for place, rank in enumerate(self._members())},
            starts_for(me, {rank: plan.sends for rank, plan in plans.items()}),
            starts_for(me, {rank: plan.recvs for rank, plan in plans.items()}),
        )

    def __getstate__(self) -> dict[str, Any]:
        """Leave the shared memory behind."""
        return super().__getstate__() | {"_staging": None}

    def forward(self, input: Tensor) -> Tensor:
        """Return this rank's block on `P_y`."""
        if not self._takes_part:
            return self._outside(input, preserve_batch=self.preserve_batch)

        def start(fits: bool) -> Flight:
            moved = self._plan
            given = input.detach().to(moved.dtype) if fits else None
            return start_moves(given, moved.overlap, moved.dtype, moved.comm, moved.stage)

        flight = self._under_way(start, (input,))
        overlap, dtype = self._plan.overlap, self._plan.dtype
        if overlap.is_identity and input.dtype == dtype and self._plan.stage is None:
            return identity(input)
        after = overlap.dest_shape
        if after is None:
            after = zero_volume(input, preserve_batch=self.preserve_batch)
        plan = RepartitionOnGroup(
            self._plan.comm, overlap, tuple(input.shape), after, flight, self._plan.stage
        )
        return RepartitionMap.apply(self._tied(input.to(dtype)), plan)


DistributedTranspose = Repartition
