"""DistDL's `nn.all_sum_reduce`."""

from __future__ import annotations

from collections.abc import Sequence

from unisono import nn as ours
from unisono.topology import Partition

from ..backends.mpi.partition import MPIPartition, layout_of
from .module import Module

__all__ = ["AllSumReduce"]


class AllSumReduce(ours.AllSumReduce, Module):
    """Sum over the ranks that share the index outside `axes_reduce`; gradients likewise."""

    def __init__(
        self,
        P_x: MPIPartition | Partition,
        axes_reduce: int | Sequence[int] | None = None,
        axes_keep: int | Sequence[int] | None = None,
    ) -> None:
        super().__init__(layout_of(P_x), axes_reduce, axes_keep)
