"""A communicator with the verbs of MPI: `Allreduce`, `Send`, `Split`, ..., on any backend.

For programs written in that style (HeAT, mpi4py); new code finds the same in `Communicator` with
torch's spelling. `MPI` holds the constants; no MPI library is needed.
"""

from __future__ import annotations

from unisono.comm.mpi_style import constants as MPI
from unisono.comm.mpi_style.communication import (
    MPI_SELF,
    MPI_WORLD,
    Communication,
    MPICommunication,
    get_comm,
    sanitize_comm,
    use_comm,
)
from unisono.comm.mpi_style.messages import Request, Status

__all__ = [
    "MPI",
    "MPI_SELF",
    "MPI_WORLD",
    "Communication",
    "MPICommunication",
    "Request",
    "Status",
    "get_comm",
    "sanitize_comm",
    "use_comm",
]
