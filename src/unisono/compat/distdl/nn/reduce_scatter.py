"""The `nn.reduce_scatter` of DistDL's forks."""

from __future__ import annotations

from collections.abc import Sequence

from unisono import nn as ours
from unisono.topology import Partition

from ..backends.mpi.partition import MPIPartition, layout_of
from .module import Module

__all__ = ["ReduceScatter"]


class ReduceScatter(ours.ReduceScatter, Module):
    """Sum over one axis and keep the balanced block; gradients are joined."""

    def __init__(
        self,
        P_x: MPIPartition | Partition,
        axes_reduce_scatter: int | Sequence[int] | None = None,
        axes_keep: int | Sequence[int] | None = None,
    ) -> None:
        super().__init__(layout_of(P_x), axes_reduce_scatter, axes_keep)
