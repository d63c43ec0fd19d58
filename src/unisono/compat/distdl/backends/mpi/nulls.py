"""What stands for nobody: mpi4py's own values where it is in use, plain ones elsewhere.

mpi4py is never imported here, since that would start MPI.
"""

from __future__ import annotations

import sys
from typing import Any

from unisono.comm.mpi_style import MPI as ours


def mpi4py() -> Any:
    """Return the module `mpi4py.MPI` if the program has imported it, else None."""
    return sys.modules.get("mpi4py.MPI")


def null_rank() -> int:
    """Return the rank of nobody: `MPI.PROC_NULL`, or -1 without mpi4py."""
    mpi = mpi4py()
    return -1 if mpi is None else mpi.PROC_NULL


def null_comm() -> Any:
    """Return the communicator of nobody: `MPI.COMM_NULL`, or None without mpi4py."""
    mpi = mpi4py()
    return None if mpi is None else mpi.COMM_NULL


def operations() -> dict[str, Any]:
    """Return the reductions by name, as the verbs of `_comm` take them."""
    mpi = mpi4py() or ours
    return {"min": mpi.MIN, "max": mpi.MAX, "prod": mpi.PROD, "sum": mpi.SUM}
