"""DistDL's `utilities.debug`."""

from __future__ import annotations

from typing import Any


def print_sequential(comm: Any, val: object) -> None:
    """Print the values of all ranks in their order, on rank 0. Collective over `comm`.

    Args:
        comm: with mpi4py's verbs: `P._comm` of a partition, or an mpi4py communicator.
        val: anything that can be pickled.
    """
    values = comm.gather(val, root=0)
    if values is not None:
        print(*values, sep="\n", flush=True)
