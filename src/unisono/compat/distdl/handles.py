"""What mpi4py calls communicators, groups and nobody, whether or not the program has it.

mpi4py is never imported here, since that would start MPI.
"""

from __future__ import annotations

import sys
from typing import Any

from unisono.comm import Communicator
from unisono.comm.mpi_style import MPI as ours
from unisono.comm.mpi_style import MPI_WORLD, MPICommunication
from unisono.topology import Partition


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


def check_identical_comm(c1: Any, c2: Any) -> bool:
    """Return whether two communicators are the same one. Nobody's is unlike any."""
    return not check_null_comm(c1) and not check_null_comm(c2) and _identical("Comm", c1, c2)


def check_identical_group(g1: Any, g2: Any) -> bool:
    """Return whether two groups hold the same ranks in the same order. Nobody's is unlike any."""
    return not check_null_group(g1) and not check_null_group(g2) and _identical("Group", g1, g2)


def check_null_comm(c: Any) -> bool:
    """Return whether this is the communicator of nobody."""
    mpi = mpi4py()
    return c is None or (mpi is not None and isinstance(c, mpi.Comm) and c == mpi.COMM_NULL)


def check_null_group(g: Any) -> bool:
    """Return whether this is the group of nobody."""
    mpi = mpi4py()
    return g is None or (mpi is not None and isinstance(g, mpi.Group) and g == mpi.GROUP_NULL)


def _identical(kind: str, one: Any, other: Any) -> bool:
    mpi = mpi4py()
    if mpi is not None and all(isinstance(x, getattr(mpi, kind)) for x in (one, other)):
        return getattr(mpi, kind).Compare(one, other) == mpi.IDENT
    return bool(one == other)


def check_null_rank(r: int) -> bool:
    """Return whether this is the rank of nobody."""
    return r == null_rank()


class Root:
    """The communicator in which the ranks of partitions are counted.

    Args:
        handle: an mpi4py communicator (then this is collective over it, once), a `Communicator`,
            a `ProcessGroup`, or an object of ours with the verbs of MPI.
    """

    def __init__(self, handle: Any) -> None:
        if _is_mpi4py_world_of_one(handle) and Communicator.of(MPI_WORLD).size > 1:
            # Whoever started the ranks, it was not mpiexec: MPI knows each of them alone.
            handle = MPI_WORLD
        self.handle = handle
        self.comm = Communicator.of(handle)
        self._is_mpi = mpi4py() is not None and isinstance(handle, mpi4py().Comm)
        self._real: dict[tuple[int, ...], Any] = {}

    def verbs_for(self, layout: Partition) -> Any:
        """Return the ranks of a partition as an object with mpi4py's verbs.

        A real communicator where the root is one; making it is collective over its ranks.
        """
        if layout.ranks == tuple(range(self.comm.size)) and hasattr(self.handle, "Get_rank"):
            return self.handle
        if not self._is_mpi:
            return MPICommunication(layout)
        if layout.ranks not in self._real:
            everybody = self.handle.Get_group()
            group = everybody.Incl(list(layout.ranks))
            # The tag keeps apart groups that share some ranks and are made at the same time.
            self._real[layout.ranks] = self.handle.Create_group(group, tag=layout.ranks[0])
            group.Free()
            everybody.Free()
        return self._real[layout.ranks]

    def ranks_of(self, group: Any) -> tuple[int, ...] | None:
        """Return the ranks of an mpi4py group, or given as numbers; None for nobody."""
        if check_null_group(group):
            return None
        if self._is_mpi and isinstance(group, mpi4py().Group):
            everybody = self.handle.Get_group()
            found = group.Translate_ranks(None, everybody)
            everybody.Free()
            return tuple(found)
        return tuple(int(rank) for rank in group)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Root) and self.comm == other.comm

    def __hash__(self) -> int:
        return hash(self.comm)


def _is_mpi4py_world_of_one(handle: Any) -> bool:
    mpi = mpi4py()
    if mpi is None or not isinstance(handle, mpi.Comm) or handle == mpi.COMM_NULL:
        return False
    return handle == mpi.COMM_WORLD and handle.Get_size() == 1
