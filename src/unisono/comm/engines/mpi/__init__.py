"""Transport for ranks of an MPI job: shared memory inside a host, MPI between hosts.

Nothing here imports mpi4py before a group is made.
"""

from __future__ import annotations

from unisono.comm.engines.mpi.engine import MpiEngine
from unisono.comm.engines.mpi.groups import entry_of, make_group
from unisono.comm.engines.mpi.library import (
    is_communicator,
    split,
    store_for,
    store_of,
    unavailable,
    wire_of,
    wire_of_world,
    wire_world,
)

__all__ = [
    "MpiEngine",
    "entry_of",
    "is_communicator",
    "make_group",
    "split",
    "store_for",
    "store_of",
    "unavailable",
    "wire_of",
    "wire_of_world",
    "wire_world",
]
