"""Transport for ranks of an MPI job: tensors go over an mpi4py communicator.

Nothing here imports mpi4py before a group is made.
"""

from __future__ import annotations

from unisono.comm.transports.mpi.engine import MpiEngine
from unisono.comm.transports.mpi.library import is_communicator, unavailable
from unisono.comm.transports.mpi.process_group import MpiProcessGroup, create
from unisono.comm.transports.mpi.world import entry_of, start_world, store_for, store_of

__all__ = [
    "MpiEngine",
    "MpiProcessGroup",
    "create",
    "entry_of",
    "is_communicator",
    "start_world",
    "store_for",
    "store_of",
    "unavailable",
]
