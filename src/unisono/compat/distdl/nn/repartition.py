"""DistDL's `nn.repartition`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unisono import nn as ours
from unisono.topology import Partition
from unisono.topology.halo_plan import Box
from unisono.topology.overlap import Move, OverlapPlan

from ..backends.mpi.buffer import MPIBufferManager, manager_or_new
from ..backends.mpi.partition import MPIPartition, layout_of
from ..utilities.slicing import compute_nd_slice_shape
from .module import Module

__all__ = ["Repartition"]


class Repartition(ours.Repartition, Module):
    """Move a tensor from the blocks of one partition to the balanced blocks of another."""

    def __init__(
        self,
        P_x: MPIPartition | Partition,
        P_y: MPIPartition | Partition,
        preserve_batch: bool = True,
        buffer_manager: MPIBufferManager | None = None,
    ) -> None:
        super().__init__(layout_of(P_x), layout_of(P_y), preserve_batch)
        self.buffer_manager = manager_or_new(buffer_manager)

    @property
    def P_x_to_y_overlaps(self) -> list[tuple[Any, Any, Any]]:
        """For each rank of `P_y`: slices in the own input, their shape, the partner.

        Partners are ranks of the union of both partitions, or "self"; three times None for a rank
        that gets nothing from here. Empty before the first call, and outside of `P_x`.
        """
        plan = self._overlap_plan
        if plan is None or not self.P_x.active:
            return []
        local = None if plan.local is None else plan.local.source
        return self._listed(plan.sends, local, self.P_y.ranks)

    @property
    def P_y_to_x_overlaps(self) -> list[tuple[Any, Any, Any]]:
        """For each rank of `P_x`: slices in the own output, their shape, the partner. As above."""
        plan = self._overlap_plan
        if plan is None or not self.P_y.active:
            return []
        local = None if plan.local is None else plan.local.dest
        return self._listed(plan.recvs, local, self.P_x.ranks)

    @property
    def _overlap_plan(self) -> OverlapPlan | None:
        is_ready = self._distdl_is_setup and self._takes_part
        return self._plan.overlap if is_ready else None

    def _listed(
        self, moves: Sequence[Move], local: Box | None, others: Sequence[int]
    ) -> list[tuple[Any, Any, Any]]:
        union = self.P_x.union(self.P_y).ranks
        boxes = {move.peer: move.box for move in moves}
        found: list[tuple[Any, Any, Any]] = []
        for rank in others:
            is_self = rank == self.P_x.root.rank
            box = local if is_self else boxes.get(rank)
            if box is None:
                found.append((None, None, None))
                continue
            slices = tuple(slice(start, stop) for start, stop in box)
            partner = "self" if is_self else union.index(rank)
            found.append((slices, compute_nd_slice_shape(slices), partner))
        return found
