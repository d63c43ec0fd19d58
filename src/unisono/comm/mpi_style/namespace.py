"""The names of `mpi4py.MPI` that programs of this style use; imported as `MPI`."""

from __future__ import annotations

from unisono.comm.mpi_style.communication import MPI_SELF as COMM_SELF
from unisono.comm.mpi_style.communication import MPI_WORLD as COMM_WORLD
from unisono.comm.mpi_style.communication import MPICommunication as Comm
from unisono.comm.mpi_style.constants import (
    ANY_SOURCE,
    ANY_TAG,
    BAND,
    BOR,
    BXOR,
    IN_PLACE,
    LAND,
    LOR,
    LXOR,
    MAX,
    MAXLOC,
    MIN,
    MINLOC,
    PROC_NULL,
    PROD,
    SUM,
    UNDEFINED,
    Op,
)
from unisono.comm.mpi_style.requests import Request, Status

__all__ = [
    "ANY_SOURCE",
    "ANY_TAG",
    "BAND",
    "BOR",
    "BXOR",
    "COMM_SELF",
    "COMM_WORLD",
    "IN_PLACE",
    "LAND",
    "LOR",
    "LXOR",
    "MAX",
    "MAXLOC",
    "MIN",
    "MINLOC",
    "PROC_NULL",
    "PROD",
    "SUM",
    "UNDEFINED",
    "Comm",
    "Finalize",
    "Init",
    "Is_finalized",
    "Is_initialized",
    "Op",
    "Request",
    "Status",
]


def Init() -> None:
    """Do nothing: ranks meet at the first verb."""


def Finalize() -> None:
    """Do nothing: the world is closed, by all ranks together, when they end."""


def Is_initialized() -> bool:
    """Return True, as after any import of mpi4py."""
    return True


def Is_finalized() -> bool:
    """Return False: see `Finalize`."""
    return False
