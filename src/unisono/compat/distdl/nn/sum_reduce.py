"""DistDL's `nn.sum_reduce`."""

from __future__ import annotations

from unisono import nn as ours
from unisono.topology import Partition

from ..backends.mpi.partition import MPIPartition, layout_of
from .module import Module

__all__ = ["SumReduce"]


class SumReduce(ours.SumReduce, Module):
    """Sum on each rank of `P_y` the blocks of `P_x` that belong to its place."""

    def __init__(
        self,
        P_x: MPIPartition | Partition,
        P_y: MPIPartition | Partition,
        transpose_src: bool = False,
        transpose_dest: bool = False,
        preserve_batch: bool = True,
    ) -> None:
        super().__init__(
            layout_of(P_x), layout_of(P_y), transpose_src, transpose_dest, preserve_batch
        )
