"""`MPICommunication`: a group of ranks with the verbs of MPI, and the communicators all know."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from unisono.comm import groups, transports
from unisono.comm.communicator import Communicator, world
from unisono.comm.groups import GroupEntry, has_world
from unisono.comm.lifecycle import leave_at_exit, start_world
from unisono.comm.mpi_style import buffers
from unisono.comm.mpi_style.constants import is_undefined
from unisono.comm.mpi_style.messages import Messages, PlainMessages
from unisono.comm.mpi_style.verbs import Verbs
from unisono.environment import detect
from unisono.errors import MeshError, an, explain

_contexts: weakref.WeakKeyDictionary[GroupEntry, itertools.count[int]] = weakref.WeakKeyDictionary()


class Communication:
    """What every communicator of this style is an instance of, as in HeAT."""


class MPICommunication(Verbs, Communication):
    """A group of ranks with the verbs of MPI, over any backend of torch.distributed.

    Args:
        handle: None (the world, looked up at first use), a `Communicator`, a torch
            `ProcessGroup`, or an mpi4py communicator (then the first use is collective over it).

    >>> import torch
    >>> comm, total = MPICommunication(), torch.empty(2)
    >>> comm.Allreduce(torch.ones(2), total)
    >>> comm.rank, comm.size, total.tolist()
    (0, 1, [1.0, 1.0])
    """

    def __init__(self, handle: object = None) -> None:
        if not (
            isinstance(handle, (Communicator, dist.ProcessGroup, type(None)))
            or hasattr(handle, "__unisono_communicator__")
            or transports.mpi.is_communicator(handle)
        ):
            raise TypeError(
                explain(
                    f"MPICommunication({handle!r})",
                    an(type(handle).__name__),
                    None,
                    "None, a Communicator, a ProcessGroup or an mpi4py communicator",
                )
            )
        self._handle = handle
        self._context = 0
        self._wire: Any = None
        """Communicator of mpi4py for the messages; None: they go as those of torch do."""
        self._made_messages: Messages | None = None
        self._is_null = False
        self._resolved: Communicator | None = None
        self._resolved_world: dist.ProcessGroup | None = None

    @property
    def _comm(self) -> Communicator:
        if self._is_null:
            raise MeshError.because(
                "a verb of a communicator without ranks",
                "Split with color=UNDEFINED put this rank in no group, or it was freed",
                None,
                "if comm.rank is not None: ...",
            )
        resolved = self._resolved
        if resolved is None or self._resolved_world is not dist.group.WORLD:
            resolved = self._resolved = self._find()
            self._resolved_world = dist.group.WORLD
        return resolved

    @property
    def _messages(self) -> Messages:
        comm, made = self._comm, self._made_messages
        if made is None or made.comm is not comm:
            made = self._made_messages = self._make_messages(comm)
        return made

    def _make_messages(self, comm: Communicator) -> Messages:
        if self._wire is None or comm.size == 1:
            return PlainMessages(comm, self._context)
        from unisono.comm.mpi_style.mpi_messages import MpiMessages  # which loads MPI

        return MpiMessages(comm, self._wire)

    def _find(self) -> Communicator:
        comm = world_from_environment() if self._handle is None else Communicator.of(self._handle)
        if transports.mpi.is_communicator(self._handle):
            self._wire = transports.mpi.wire_of(self._handle)
        elif self._context == 0 and comm._entry is groups.world_entry():
            self._wire = transports.mpi.wire_of_world()
        return comm

    def _forget(self) -> None:
        """Let go of a world that has ended; the next use looks again."""
        self._resolved = self._resolved_world = self._made_messages = None

    def __unisono_communicator__(self, axis: str | int | None = None) -> Communicator:
        """Return the `Communicator` underneath: `Communicator.of(comm)` asks for it."""
        if axis is not None:
            raise MeshError.because(f"axis={axis!r} of an MPICommunication", "it has no axes")
        return self._comm

    @property
    def handle(self) -> object:
        """What this was made of; for the world, the `Communicator` that was found."""
        return self._handle if self._handle is not None or self._is_null else self._comm

    @property
    def rank(self) -> int | None:
        """Own place; None where this rank is in no group."""
        return None if self._is_null else self._comm.rank

    @property
    def size(self) -> int | None:
        """Number of ranks; None where this rank is in no group."""
        return None if self._is_null else self._comm.size

    def Get_rank(self) -> int | None:
        """Return `rank`."""
        return self.rank

    def Get_size(self) -> int | None:
        """Return `size`."""
        return self.size

    def is_distributed(self) -> bool:
        """Whether there is more than one rank."""
        return (self.size or 1) > 1

    def chunk(
        self,
        shape: Sequence[int],
        split: int | None,
        rank: int | None = None,
        w_size: int | None = None,
        sparse: bool = False,
    ) -> tuple[Any, ...]:
        """Return (offset, local shape, slices) of what a rank holds of an array. Local.

        Args:
            shape: shape of the whole array.
            split: axis along which it is split; None where every rank has all of it.
            rank: default: this rank.
            w_size: number of ranks; default: `size`.
            sparse: return (first row, row after the last) instead.
        """
        place = self._comm.rank if rank is None else rank
        ranks = self._comm.size if w_size is None else w_size
        offset, local, slices = buffers.chunk(shape, split, place, ranks)
        if sparse:
            return offset, offset + local[split or 0]
        return offset, local, slices

    def counts_displs_shape(
        self, shape: Sequence[int], axis: int
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Return rows of each rank, their first ones, and the shape with `size` times own rows."""
        whole, comm = tuple(shape), self._comm
        along = buffers.check_axis(axis, len(whole), "counts_displs_shape")
        counts, displs = buffers.counts_displs(whole[along], comm.size)
        padded = (*whole[:along], comm.size * counts[comm.rank], *whole[along + 1 :])
        return counts, displs, padded

    def Split(self, color: int | None = 0, key: int = 0) -> MPICommunication:
        """Return the communicator of the ranks with this `color`, ordered by (key, rank).

        Collective. With `UNDEFINED` (or None) the result has rank and size None.
        """
        is_out = color is None or is_undefined(color)
        part = self._comm.split(None if is_out else color, key)
        wire = transports.mpi.split(self._wire, None if is_out else color, key)
        if part is None:
            nothing = MPICommunication()
            nothing._is_null = True
            return nothing
        return _in_new_context(part, wire)

    def Dup(self) -> MPICommunication:
        """Return the same ranks with messages of their own. Collective."""
        comm = Communicator.of(self._comm)
        return _in_new_context(comm, transports.mpi.split(self._wire, 0, comm.rank))

    def Free(self) -> None:
        """Let go of a communicator that `Split` or `Dup` made. Collective."""
        if self._handle is None and not self._is_null:
            raise MeshError.because("Free() of the world", None, None, "free what Split returned")
        if not self._is_null:
            comm, self._is_null, self._resolved = self._comm, True, None
            if isinstance(self._handle, Communicator) and self._context:
                comm.close()

    def _identity(self) -> tuple[object, ...]:
        return (None,) if self._is_null else (self._comm, self._context)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MPICommunication) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(MPICommunication)  # looking up the world must not change it

    def __repr__(self) -> str:
        if self._is_null:
            return "MPICommunication(no ranks)"
        if self._resolved is None:
            return "MPICommunication(not used yet)"
        return f"MPICommunication(rank {self._resolved.rank} of {self._resolved.size})"

    def __deepcopy__(self, memo: dict[int, object]) -> MPICommunication:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return MPICommunication, (None if self._handle is None else self._comm,)


class SelfCommunication(MPICommunication):
    """This rank alone."""

    def _find(self) -> Communicator:
        everyone = world_from_environment()
        return everyone.sub([everyone.rank]) or everyone

    def __reduce__(self) -> tuple[object, ...]:
        return SelfCommunication, ()


def _in_new_context(comm: Communicator, wire: Any) -> MPICommunication:
    made = MPICommunication(comm)
    made._wire = wire
    made._context = next(_contexts.setdefault(comm._entry, itertools.count(1)))
    return made


def world_from_environment() -> Communicator:
    """Return the world: the default group, else that of the launcher's environment, else alone.

    Collective over the ranks of the launcher when it starts their world, which is then closed when
    the process ends.
    """
    if not has_world() and (environment := detect()).is_world:
        start_world(environment)
        leave_at_exit()
    return world()


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
