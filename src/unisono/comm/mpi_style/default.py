"""The communicators everybody knows, and the one that is used where none is given."""

from __future__ import annotations

from unisono.comm import groups
from unisono.comm.mpi_style.communication import MPICommunication, SelfCommunication

MPI_WORLD = MPICommunication()
"""All ranks; looked up at first use, and again when a new world has been started."""
MPI_SELF = SelfCommunication()
"""This rank alone."""

for _lasting in (MPI_WORLD, MPI_SELF):
    groups.when_forgotten(_lasting._forget)

_default: MPICommunication = MPI_WORLD


def get_comm() -> MPICommunication:
    """Return the communicator that is used where none is given. Local."""
    return _default


def use_comm(comm: object = None) -> None:
    """Make `comm` the one that is used where none is given; None leaves it as it is. Local."""
    global _default
    _default = sanitize_comm(comm)


def sanitize_comm(comm: object) -> MPICommunication:
    """Return `comm` as an `MPICommunication`; None is the default one. Local.

    Raises:
        TypeError: `comm` is nothing that names ranks.
    """
    if comm is None:
        return _default
    return comm if isinstance(comm, MPICommunication) else MPICommunication(comm)
