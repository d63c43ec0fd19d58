"""The `nn.all_gather` of DistDL's forks."""

from __future__ import annotations

from collections.abc import Sequence

from unisono import nn as ours
from unisono.topology import Partition

from ..backends.mpi.partition import MPIPartition, layout_of
from .module import Module

__all__ = ["AllGather"]


class AllGather(ours.AllGather, Module):
    """Join the blocks along one axis, on every rank; gradients are summed, each keeps its own."""

    def __init__(
        self,
        P_x: MPIPartition | Partition,
        axes_all_gather: int | Sequence[int] | None = None,
        axes_keep: int | Sequence[int] | None = None,
        scale_backward: int | slice | None = None,
    ) -> None:
        super().__init__(layout_of(P_x), axes_all_gather, axes_keep, scale_backward)
