"""The part of HeAT's `core` that is offered: the communicator."""

from __future__ import annotations

from unisono.compat.heat.core import communication
from unisono.compat.heat.core.communication import (
    MPI,
    MPI_SELF,
    MPI_WORLD,
    Communication,
    MPICommunication,
    MPIRequest,
    get_comm,
    sanitize_comm,
    use_comm,
)

__all__ = [
    "MPI",
    "MPI_SELF",
    "MPI_WORLD",
    "Communication",
    "MPICommunication",
    "MPIRequest",
    "communication",
    "get_comm",
    "sanitize_comm",
    "use_comm",
]
