"""HeAT's `optim.dp_optimizer`: DASO's ranks are those of `MPI_WORLD` where none are given."""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import Optimizer

from unisono import data_parallel
from unisono.comm.mpi_style import MPI_WORLD
from unisono.data_parallel import DataParallelOptimizer

__all__ = ["DASO", "DataParallelOptimizer"]


class DASO(data_parallel.DASO):
    """`unisono.data_parallel.DASO` with HeAT's communicator as `comm`. Collective over `comm`.

    `DataParallelMultiGPU` takes it from here.
    """

    def __init__(
        self,
        local_optimizer: Optimizer,
        total_epochs: int,
        comm: object = MPI_WORLD,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        comm = MPI_WORLD if comm is None else comm
        super().__init__(local_optimizer, total_epochs, comm, *args, **kwargs)
