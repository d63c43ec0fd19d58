"""DistDL's `nn.transpose`: the former name of `nn.repartition`."""

from __future__ import annotations

import warnings

from unisono.topology import Partition

from ..backends.mpi.buffer import MPIBufferManager
from ..backends.mpi.partition import MPIPartition
from .repartition import Repartition

__all__ = ["DistributedTranspose"]


class DistributedTranspose(Repartition):
    """`Repartition` under its former name; making one warns."""

    def __init__(
        self,
        P_x: MPIPartition | Partition,
        P_y: MPIPartition | Partition,
        preserve_batch: bool = True,
        buffer_manager: MPIBufferManager | None = None,
    ) -> None:
        warnings.warn(
            "DistributedTranspose is the former name of Repartition",
            DeprecationWarning,
            stacklevel=2,
        )
        super().__init__(P_x, P_y, preserve_batch, buffer_manager)
