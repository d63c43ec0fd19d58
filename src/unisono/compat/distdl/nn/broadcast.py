"""DistDL's `nn.broadcast`."""

from __future__ import annotations

from unisono import nn as ours
from unisono.topology import Partition

from ..backends.mpi.partition import MPIPartition, layout_of
from .module import Module

__all__ = ["Broadcast"]


class Broadcast(ours.Broadcast, Module):
    """Give each rank of `P_y` the block of `P_x` that belongs to its place; gradients are summed.

    With one side transposed, ranks are paired by their reversed index.
    """

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
