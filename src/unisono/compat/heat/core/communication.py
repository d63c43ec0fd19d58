"""HeAT's `core.communication`."""

from __future__ import annotations

from unisono.comm.mpi_style import (
    MPI,
    MPI_SELF,
    MPI_WORLD,
    Communication,
    MPICommunication,
    get_comm,
    sanitize_comm,
    use_comm,
)
from unisono.comm.mpi_style import Request as MPIRequest

__all__ = [
    "MPI",
    "MPI_SELF",
    "MPI_WORLD",
    "Communication",
    "MPICommunication",
    "MPIRequest",
    "get_comm",
    "sanitize_comm",
    "use_comm",
]
