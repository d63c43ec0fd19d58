"""DistDL's `backends.mpi.partition`: teams of ranks, with or without a grid.

Every rank of the root knows the ranks and the shape of every partition, also of those it is not in;
so layers agree on who does what without asking. Over mpi4py communicators and torch process groups.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, Self

import numpy as np
import torch

from unisono.comm import Communicator
from unisono.comm.mpi_style import MPI as ours
from unisono.comm.mpi_style import MPI_WORLD, MPICommunication
from unisono.errors import PartitionError, an
from unisono.expect import expect_choice
from unisono.topology import Partition, broadcast_groups, reduce_groups
from unisono.topology.fanout import Group

_REDUCTIONS = {"min": "min", "max": "max", "prod": "product", "sum": "sum"}


# The null rank, communicator and group of mpi4py, whether or not the program has it. It is never
# imported here, since that would start MPI.


def mpi4py() -> Any:
    """Return the module `mpi4py.MPI` if the program has imported it, else None."""
    return sys.modules.get("mpi4py.MPI")


def null_rank() -> int:
    """Return the null rank: `MPI.PROC_NULL`, or -1 without mpi4py."""
    mpi = mpi4py()
    return -1 if mpi is None else mpi.PROC_NULL


def null_comm() -> Any:
    """Return the null communicator: `MPI.COMM_NULL`, or None without mpi4py."""
    mpi = mpi4py()
    return None if mpi is None else mpi.COMM_NULL


def operations() -> dict[str, Any]:
    """Return the reductions by name, as the verbs of `_comm` take them."""
    mpi = mpi4py() or ours
    return {"min": mpi.MIN, "max": mpi.MAX, "prod": mpi.PROD, "sum": mpi.SUM}


def check_identical_comm(c1: Any, c2: Any) -> bool:
    """Return whether two communicators are the same one; a null communicator equals none."""
    return _identical("Comm", c1, c2)


def check_identical_group(g1: Any, g2: Any) -> bool:
    """Return whether two groups hold the same ranks in the same order; a null group equals none."""
    return _identical("Group", g1, g2)


def check_null_comm(c: Any) -> bool:
    """Return whether this is the null communicator."""
    return _null("Comm", c)


def check_null_group(g: Any) -> bool:
    """Return whether this is the null group."""
    return _null("Group", g)


def check_null_rank(r: int) -> bool:
    """Return whether this is the null rank."""
    return r == null_rank()


def _null(kind: str, handle: Any) -> bool:
    mpi = mpi4py()
    if mpi is None or not isinstance(handle, getattr(mpi, kind)):
        return handle is None
    return handle == getattr(mpi, f"{kind.upper()}_NULL")


def _identical(kind: str, one: Any, other: Any) -> bool:
    if _null(kind, one) or _null(kind, other):
        return False
    mpi = mpi4py()
    if mpi is not None and all(isinstance(x, getattr(mpi, kind)) for x in (one, other)):
        return getattr(mpi, kind).Compare(one, other) == mpi.IDENT
    return bool(one == other)


class Root:
    """The communicator in which the ranks of partitions are counted.

    Args:
        handle: an mpi4py communicator (then this is collective over it, once), a `Communicator`,
            a `ProcessGroup`, or an object of ours with the verbs of MPI.
    """

    def __init__(self, handle: Any) -> None:
        if _is_mpi4py_world_of_one(handle) and Communicator.of(MPI_WORLD).size > 1:
            # The ranks were not started by mpiexec, so each of them is alone in its MPI.
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
            world = self.handle.Get_group()
            group = world.Incl(list(layout.ranks))
            # The tag keeps apart groups that share some ranks and are made at the same time.
            self._real[layout.ranks] = self.handle.Create_group(group, tag=layout.ranks[0])
            group.Free()
            world.Free()
        return self._real[layout.ranks]

    def ranks_of(self, group: Any) -> tuple[int, ...] | None:
        """Return the ranks of an mpi4py group, or given as numbers; None for a null group."""
        if check_null_group(group):
            return None
        if self._is_mpi and isinstance(group, mpi4py().Group):
            world = self.handle.Get_group()
            ranks = group.Translate_ranks(None, world)
            world.Free()
            return tuple(ranks)
        return tuple(int(rank) for rank in group)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Root) and self.comm == other.comm

    def __hash__(self) -> int:
        return hash(self.comm)

    def __reduce__(self) -> tuple[object, ...]:
        return Root, (self.comm,)


def _is_mpi4py_world_of_one(handle: Any) -> bool:
    mpi = mpi4py()
    if mpi is None or not isinstance(handle, mpi.Comm) or handle == mpi.COMM_NULL:
        return False
    return handle == mpi.COMM_WORLD and handle.Get_size() == 1


class MPIPartition:
    """A team of ranks.

    Args:
        comm: an mpi4py communicator, a `ProcessGroup`, a `Communicator`, or nothing: inactive.
        group: the members, as an mpi4py group or ranks of `root`; only needed where `comm` is
            nothing.
        root: the communicator that ranks are counted in; default `comm`.

    Attributes:
        active: whether this rank is a member.
        rank: own rank in the team; `MPI.PROC_NULL` (-1 without mpi4py) if inactive.
        size: number of members; -1 if inactive.
        shape: of the grid, a numpy array; `[size]` without one.
        dim: number of dims.
        index: own place in the grid, a numpy array; None if inactive.

    >>> P_world = MPIPartition(Communicator.of(None))
    >>> P_world.rank, P_world.size, P_world.active
    (0, 1, True)
    """

    active: bool
    rank: int
    size: int
    shape: np.ndarray
    dim: int
    index: np.ndarray | None
    _comm: Any
    """The members with mpi4py's verbs; the null communicator if inactive."""
    _root: Any
    """The communicator that `root` or `comm` was."""
    _group: tuple[int, ...] | None
    """Members as ranks of the root; None where they are not known."""

    def __init__(self, comm: Any = None, group: Any = None, root: Any = None) -> None:
        self._fill(*_placed(comm, group, root))

    def _fill(
        self,
        tree: Root | None,
        members: tuple[int, ...] | None,
        shape: tuple[int, ...] | None = None,
    ) -> None:
        self._tree = tree
        self._group = members
        self._grid = shape
        self._root = null_comm() if tree is None else tree.handle
        self._layout: Partition | None = None
        if tree is not None and members is not None:
            grid = (len(members),) if shape is None else shape
            self._layout = Partition(grid, ranks=members, comm=tree.comm)
        if tree is None or self._layout is None or not self._layout.active:
            self._become_inactive()
            return
        self.active = True
        self.rank = int(self._layout.rank or 0)
        self.size = self._layout.size
        self.shape = np.array(self._layout.shape)
        self.dim = self._layout.dim
        self.index = np.array(self._layout.index)
        self._comm = tree.verbs_for(self._layout)

    def _become_inactive(self) -> None:
        self.active = False
        self.rank = null_rank()
        self.size = -1
        self.shape = np.array([-1] if self._grid is None else self._grid)
        self.dim = len(self.shape)
        self.index = None
        self._comm = null_comm()

    def deactivate(self) -> None:
        """Leave the team; safe to repeat. Groups stay in their cache, a grid keeps its shape."""
        self._layout = self._group = None
        self._become_inactive()

    def create_partition_inclusive(self, ranks: Iterable[int]) -> MPIPartition:
        """Return the team of these members, in that order.

        Called by all ranks of the root, like all `create_*`.

        Args:
            ranks: ranks of this partition.
        """
        if self._layout is None:
            return MPIPartition()
        chosen = self._layout.subset([int(rank) for rank in ranks]).ranks
        return MPIPartition._made(self._tree, chosen)

    def create_partition_union(self, other: MPIPartition) -> MPIPartition:
        """Return the team of own members, then those that only `other` has."""
        return MPIPartition._made(self._tree, layout_of(self).union(layout_of(other)).ranks)

    def create_cartesian_topology_partition(
        self, shape: Iterable[int], **options: Any
    ) -> MPICartesianPartition:
        """Return the same members in a grid; an inactive rank keeps its shape too.

        Args:
            shape: number of ranks in each dim; all members are used.
            options: of `MPI_Cart_create`, without effect: grids are row-major and have ends.
        """
        unknown = sorted(options.keys() - {"periods", "reorder"})
        if unknown:
            raise TypeError(f"create_cartesian_topology_partition got unknown options {unknown}")
        return MPICartesianPartition._made(self._tree, self._group, shape)

    def create_broadcast_partition_to(
        self, P_dest: MPIPartition, transpose_src: bool = False, transpose_dest: bool = False
    ) -> tuple[MPIPartition, MPIPartition]:
        """Return the team this rank sends its block to, and the one it gets a block in.

        The sender is rank 0 of a team. A side that this rank is not on is inactive; the two are
        one object where a rank gets its own block.
        """
        groups = broadcast_groups(layout_of(self), layout_of(P_dest), transpose_src, transpose_dest)
        return self._both(groups, sends_as_root=True)

    def create_reduction_partition_to(
        self, P_dest: MPIPartition, transpose_src: bool = False, transpose_dest: bool = False
    ) -> tuple[MPIPartition, MPIPartition]:
        """Return the team this rank's block is summed in, and the one whose sum it gets.

        The receiver of a sum is rank 0 of a team.
        """
        groups = reduce_groups(layout_of(self), layout_of(P_dest), transpose_src, transpose_dest)
        return self._both(groups, sends_as_root=False)

    def create_allreduction_partition(self, axes_reduce: Iterable[int]) -> MPIPartition:
        """Return the members that share this rank's index outside of `axes_reduce`.

        Their grid has 1 in the other dims; inactive on a rank that is not a member.
        """
        if self._layout is None or not self.active:
            return MPIPartition()
        shared = self._layout.sub(tuple(int(axis) for axis in axes_reduce))
        return MPICartesianPartition._made(self._tree, shared.ranks, shared.shape)

    def broadcast_data(
        self, data: Any, root: int = 0, P_data: MPIPartition | None = None
    ) -> np.ndarray | None:
        """Return one member's array on all of them; None on other ranks.

        Args:
            data: anything that numpy makes an array of; looked at on the root only.
            root: whose, as a rank of `P_data`.
            P_data: default this partition.
        """
        if not self.active:
            return None
        at = root
        if P_data is not None:
            data_rank = P_data.rank if P_data.active else -1
            places = [place for (place,) in self._members.all_gather_ints([data_rank])]
            if root not in places:
                raise PartitionError.because(
                    f"broadcast_data(root={root})",
                    f"ranks of P_data on the members: {places}",
                    hint="a rank of P_data that is a member of this partition too",
                )
            at = places.index(root)
        array = np.atleast_1d(data) if self.rank == at else None
        return self._members.broadcast_object(array, at)

    def allgather_data(self, data: Any) -> np.ndarray:
        """Return the arrays of all members, `(size, len)`, on each of them."""
        return np.stack(self._members.all_gather_object(np.atleast_1d(data)))

    def allreduce_data(self, data: Any, op: str = "sum") -> np.ndarray:
        """Return the arrays of all members combined, on each of them.

        Args:
            data: equal in shape and dtype on all members.
            op: "min", "max", "prod" or "sum".
        """
        expect_choice("op", op, _REDUCTIONS, error=PartitionError)
        values = torch.from_numpy(np.array(data))
        return self._members.with_device("cpu").all_reduce(values, _REDUCTIONS[op]).numpy()

    def print_sequential(self, val: object) -> None:
        """Print the values of all members in their order, on the first. Collective over them."""
        if self.active:
            print_sequential(self._comm, val)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MPIPartition):
            return NotImplemented
        return (
            self.active
            and other.active
            and (self._tree, self._group, self.rank) == (other._tree, other._group, other.rank)
        )

    def __hash__(self) -> int:
        return hash(self._group)

    def __repr__(self) -> str:
        if self._layout is None:
            return f"{type(self).__name__}(no members)"
        place = f"rank {self.rank} of {self.size}" if self.active else "inactive here"
        return f"{type(self).__name__}({place}, {self._layout!r})"

    def __copy__(self) -> MPIPartition:
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def __deepcopy__(self, memo: dict[int, object]) -> MPIPartition:
        return self.__copy__()  # the same ranks and groups; only what deactivate() sets is its own

    def __reduce__(self) -> tuple[object, ...]:
        return type(self)._made, (self._tree, self._group, self._grid)

    def __unisono_communicator__(self, axis: str | int | None) -> Communicator:
        """Let `Communicator.of(P)` find the members, or with `axis` those along it."""
        return layout_of(self).__unisono_communicator__(axis)

    @property
    def _members(self) -> Communicator:
        return layout_of(self).comm

    @classmethod
    def _made(
        cls,
        tree: Root | None,
        members: tuple[int, ...] | None,
        shape: Iterable[int] | None = None,
    ) -> Self:
        made = cls.__new__(cls)
        made._fill(tree, members, None if shape is None else tuple(int(n) for n in shape))
        return made

    def _both(
        self, groups: Sequence[Group], *, sends_as_root: bool
    ) -> tuple[MPIPartition, MPIPartition]:
        me = layout_of(self).root.rank
        as_root = next((group for group in groups if group.root == me), None)
        as_peer = next((group for group in groups if me in group.peers), None)
        groups_here = {group for group in (as_root, as_peer) if group is not None}
        # One order on all ranks, or those in two teams would wait for each other.
        teams = {
            group: MPIPartition._made(self._tree, group.members)
            for group in sorted(groups_here, key=lambda group: sorted(group.members))
        }
        rooted, peered = (
            MPIPartition() if group is None else teams[group] for group in (as_root, as_peer)
        )
        return (rooted, peered) if sends_as_root else (peered, rooted)


class MPICartesianPartition(MPIPartition):
    """A team of ranks in a row-major grid.

    Args:
        comm: as for `MPIPartition`; likewise `group` and `root`.
        shape: number of ranks in each dim.
    """

    def __init__(self, comm: Any, group: Any, root: Any, shape: Iterable[int]) -> None:
        self._fill(*_placed(comm, group, root), tuple(int(n) for n in shape))

    def cartesian_index(self, rank: int) -> np.ndarray:
        """Return the place of a member in the grid."""
        return np.array(self._here().index_of(int(rank)))

    def neighbor_ranks(self, rank: int) -> list[tuple[int, int]]:
        """Return the members left and right of one in each dim; `MPI.PROC_NULL` at the ends."""
        no_rank = null_rank()
        return [
            (no_rank if left is None else left, no_rank if right is None else right)
            for left, right in self._here().neighbors(int(rank))
        ]

    def create_cartesian_subtopology_partition(self, remain_mask: Iterable[bool]) -> MPIPartition:
        """Return the members that share this rank's index where the mask is False.

        The grid keeps the dims where it is True. Inactive on a rank that is not a member.
        """
        if self._layout is None or not self.active:
            return MPIPartition()
        kept = [dim for dim, remains in enumerate(remain_mask) if remains]
        shared = self._layout.sub(kept)
        grid = tuple(shared.shape[dim] for dim in kept) or (1,)
        return MPICartesianPartition._made(self._tree, shared.ranks, grid)

    def _here(self) -> Partition:
        if not self.active:
            raise PartitionError.because(
                f"places in the grid {self.shape.tolist()}",
                "this rank is not in the partition",
                hint="if P.active: ...",
            )
        return layout_of(self)


def layout_of(P: MPIPartition | Partition) -> Partition:
    """Return a partition as the layers of `unisono.nn` take it."""
    if isinstance(P, Partition):
        return P
    if not isinstance(P, MPIPartition):
        raise TypeError(
            f"a partition is needed, not {an(type(P).__name__)}\n"
            "  HINT: P_world.create_partition_inclusive(ranks), and a grid of it"
        )
    if P._layout is None:
        raise PartitionError.because(
            f"the ranks of {P!r}",
            "they are not known on this rank: it was made of nothing, or deactivated",
            hint="P_world.create_partition_inclusive(ranks), on all ranks of P_world",
        )
    return P._layout


def _placed(comm: Any, group: Any, root: Any) -> tuple[Root | None, tuple[int, ...] | None]:
    """Return the root and the members that these name; None for what is not known."""
    if check_null_comm(comm):
        if check_null_comm(root):
            return None, None
        tree = Root(root)
        return tree, tree.ranks_of(group)
    if check_null_comm(root):
        tree = Root(comm)
        return tree, tuple(range(tree.comm.size))
    tree = Root(root)
    members = Communicator.of(comm).ranks
    return tree, tuple(tree.comm.ranks.index(rank) for rank in members)


def print_sequential(comm: Any, val: object) -> None:
    """Print the values of all ranks in their order, on rank 0. Collective over `comm`.

    Args:
        comm: with mpi4py's verbs: `P._comm` of a partition, or an mpi4py communicator.
        val: anything that can be pickled.
    """
    values = comm.gather(val, root=0)
    if values is not None:
        print(*values, sep="\n", flush=True)
