"""Transport for ranks of an MPI job: tensors go over an mpi4py communicator.

Nothing here imports mpi4py before a group is made.
"""

from __future__ import annotations

from unisono.comm.engines.mpi.engine import MpiEngine
from unisono.comm.engines.mpi.groups import MpiProcessGroup, entry_of, store_for, store_of
from unisono.comm.engines.mpi.library import is_communicator, unavailable

__all__ = [
    "MpiEngine",
    "MpiProcessGroup",
    "entry_of",
    "is_communicator",
    "store_for",
    "store_of",
    "unavailable",
]
