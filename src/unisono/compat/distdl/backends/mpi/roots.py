"""The communicator that a family of partitions comes from, and mpi4py's verbs for each of them."""

from __future__ import annotations

from typing import Any

from unisono.comm import Communicator
from unisono.comm.mpi_style import MPI_WORLD, MPICommunication
from unisono.topology import Partition

from .compare import check_null_group
from .nulls import mpi4py


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
