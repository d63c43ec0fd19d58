"""`Communicator`: a group of ranks as a value that is passed around, never module state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName

from unisono.comm import groups
from unisono.comm.arguments import check_device, check_ranks, check_timeout, environment_timeout_s
from unisono.comm.groups import GroupEntry, Holder
from unisono.comm.machine import host_id
from unisono.comm.messages import MessageVerbs, StartedVerbs
from unisono.errors import MeshError, UnisonoError, an
from unisono.expect import is_integer
from unisono.removed import removed_name


class Communicator(MessageVerbs):
    """A group of ranks: who they are, how tensors travel between them, and the verbs.

    A frozen value: equal and hashable by ranks, backend and device. Get one from `world()` or
    `Communicator.of(...)`, smaller ones from `sub` and `split`. Every verb is collective over the
    ranks of the communicator unless it says otherwise.

    >>> comm = Communicator.of(None)
    >>> comm.size, comm.all_reduce(torch.ones(2)).tolist()
    (1, [1.0, 1.0])
    """

    def __init__(
        self,
        entry: GroupEntry,
        *,
        device: torch.device,
        timeout_s: float | None = None,
        stages: bool = False,
    ) -> None:
        check_device(device)
        # A frozen value: __setattr__ refuses, so the fields are set all at once.
        vars(self).update(
            _entry=entry,
            _engine=entry.engine(device),
            _own_timeout_s=timeout_s,
            _stages=stages,
            _handle=Holder(),
            _closed=False,
            rank=entry.rank,
            ranks=entry.ranks,
            size=len(entry.ranks),
            device=device,
            backend=entry.backend(device),
            timeout_s=_deadline_of(entry, timeout_s),
            group_name=GroupName(entry.key),
        )
        entry.holders.add(self._handle)

    backend: str
    """Name of the backend that moves tensors on `device`; `self` for one rank."""
    group_name: GroupName
    """Name under which torch.distributed knows the group."""
    _own_timeout_s: float | None
    _handle: Holder

    @classmethod
    def of(
        cls,
        source: object = None,
        *,
        axis: str | int | None = None,
        device: torch.device | str | None = None,
        timeout_s: float | None = None,
    ) -> Communicator:
        """Return the communicator of something that names ranks. Local, except for mpi4py.

        Args:
            source: None (the world), a Communicator, a ProcessGroup, a DeviceMesh or `Mesh` (with
                one axis, or `axis`), or an mpi4py communicator (collective over it when it is
                seen for the first time; needs no torch.distributed).
            axis: name or number of the mesh axis.
            device: where tensors are expected; default: what the backend serves.
            timeout_s: deadline of each wait.

        Raises:
            MeshError: this rank is not in the group, or the mesh has several axes and none was
                named.
        """
        if timeout_s is not None:
            check_timeout(timeout_s)
        if axis is not None and isinstance(source, Communicator | dist.ProcessGroup | None):
            raise MeshError.because(
                f"Communicator.of({type(source).__name__}, axis={axis!r})",
                "only a mesh has axes",
                None,
                "leave axis out, or pass the Mesh or DeviceMesh",
            )
        kind = cls
        if isinstance(source, Communicator):
            kind, entry = type(source), source._entry
            device = source.device if device is None else device
            timeout_s = source._own_timeout_s if timeout_s is None else timeout_s
        else:
            entry = _entry_from(source, axis)
        where = entry.default_device() if device is None else torch.device(device)
        return kind(entry, device=where, timeout_s=timeout_s)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group; None for a rank alone."""
        return self._entry.group

    def process_group(self) -> dist.ProcessGroup:
        """Return the process group, for torch code that wants one even for a rank alone. Local."""
        return groups.process_group_of(self._entry)

    @property
    def start(self) -> StartedVerbs:
        """The verbs, left under way: `comm.start.all_reduce(x)` returns a `Pending`. Local."""
        return StartedVerbs(self)

    @property
    def name(self) -> str:
        """Name in traces and reports."""
        return self._entry.name

    @property
    def hosts(self) -> tuple[str, ...]:
        """Host of each rank. The first use in a group is collective over it."""
        if self._entry.hosts is None:
            self._entry.hosts = tuple(self.all_gather_object(host_id()))
        return self._entry.hosts

    def sub(self, ranks: Sequence[int]) -> Communicator | None:
        """Return the communicator of these ranks of this one; None on the other ranks.

        Collective over `self` (in effect over `ranks`: the others return at once). Asking twice
        for the same ranks gives the same group.
        """
        chosen = check_ranks(ranks, self.size, "sub")
        if self.rank not in chosen:
            return None
        return self._made(tuple(self.ranks[r] for r in chosen))

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Return the communicator of the ranks with this rank's colour, ordered by (key, rank).

        Collective over `self`. `color=None`: this rank is in none and gets None.
        """
        for what, value in (("color", 0 if color is None else color), ("key", key)):
            if not is_integer(value) or not -(2**63) <= value < 2**63:
                raise MeshError.because(
                    f"split({what}={value!r})",
                    f"{an(type(value).__name__)}; ranks compare integers of 64 bits",
                    None,
                    "split(comm.rank % 2); color=None for a rank that takes no part",
                )
        rows = self._agree("split", [int(color is not None), int(color or 0), int(key)])
        if color is None:
            return None
        members = [
            (other_key, rank)
            for rank, (present, other_color, other_key) in enumerate(rows)
            if present and other_color == color
        ]
        return self._made(tuple(self.ranks[rank] for _, rank in sorted(members)))

    def with_timeout(self, timeout_s: float) -> Communicator:
        """Return the same group with another deadline for its waits. Local."""
        deadline = check_timeout(timeout_s)
        return type(self)(self._entry, device=self.device, timeout_s=deadline, stages=self._stages)

    def with_device(self, device: torch.device | str) -> Communicator:
        """Return the same group for tensors on another device. Local."""
        return type(self)(self._entry, device=torch.device(device), timeout_s=self._own_timeout_s)

    def _staging(self) -> Communicator:
        """Return the same group for tensors of any device. Local.

        One that no backend of the group serves travels through host memory, and the host waits for
        it; a warning says so once.
        """
        changed = object.__new__(type(self))  # with the handle of this one: it is asked for often
        vars(changed).update(vars(self), _stages=True)
        return changed

    def close(self) -> None:
        """Drop this handle; the group is destroyed if we made it and no other handle is left.

        Call it on all ranks of the group. A closed communicator raises when used.
        """
        if not self._closed:
            vars(self).update(_closed=True)
            self._entry.holders.discard(self._handle)
            groups.release(self._entry)

    def _made(self, ranks: tuple[int, ...]) -> Communicator:
        entry = groups.part_of(self._entry, ranks, wait_s=self.timeout_s)
        made = type(self)(
            entry, device=self.device, timeout_s=self._own_timeout_s, stages=self._stages
        )
        made._engine.connect(self.timeout_s)
        return made

    def _identity(self) -> tuple[object, ...]:
        # Ranks of a group that stands on its own are counted elsewhere than those of the world.
        return self.ranks, self.backend, self.device, self._entry.maker is None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Communicator) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def __repr__(self) -> str:
        place = f"rank {self.rank} of {self.size}"
        return f"Communicator({place}, {self.name}, {self.backend}, {self.device})"

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(
            f"a Communicator does not change (tried to set {name!r}); "
            "with_timeout() and with_device() return changed copies"
        )

    if not TYPE_CHECKING:  # else every name would be one of its attributes

        def __getattr__(self, name: str) -> NoReturn:
            raise removed_name(f"unisono.Communicator.{name}")

    def __deepcopy__(self, memo: dict[int, object] | None = None) -> Communicator:
        return self

    __copy__ = __deepcopy__

    def __reduce__(self) -> tuple[object, ...]:
        if self._entry.maker is not None:
            raise MeshError.because(
                f"a copy of {self.name} in another process",
                "the group was made of an mpi4py communicator, and belongs to this process",
                None,
                "make it where it is used: Communicator.of(mpi4py_communicator)",
            )
        backend = None if self.group is None else str(dist.get_backend(self.group))
        where = self.ranks, backend, str(self.device), self._own_timeout_s, _world_size()
        return _restore, where


def world(*, timeout_s: float | None = None) -> Communicator:
    """Return the communicator of all ranks; of this process alone without torch.distributed.

    Local. Initialises nothing, except that a script under `unisono run` joins its world with the
    first use of it.
    """
    return Communicator.of(None, timeout_s=timeout_s)


def _entry_from(source: object, axis: str | int | None) -> GroupEntry:
    if source is None:
        return groups.world_entry()
    if source is dist.GroupMember.NON_GROUP_MEMBER:
        raise MeshError.because(
            "Communicator.of(group)",
            f"world rank {dist.get_rank()} is not a member of this group",
            None,
            "use the group on its members only, or comm.sub(ranks), which gives None elsewhere",
        )
    if isinstance(source, dist.ProcessGroup):
        return groups.entry_of(source)
    if isinstance(source, DeviceMesh):
        return _entry_of_device_mesh(source, axis)
    along_axis = getattr(source, "__unisono_communicator__", None)
    if along_axis is not None:
        return along_axis(axis)._entry
    from unisono.comm.engines import mpi  # which imports this module

    if mpi.is_communicator(source):
        return mpi.entry_of(source)
    raise UnisonoError.because(
        f"Communicator.of({type(source).__name__})",
        "it names no group of ranks",
        None,
        "None, a Communicator, a ProcessGroup, a DeviceMesh, a Mesh or an mpi4py communicator",
    )


def _entry_of_device_mesh(mesh: DeviceMesh, axis: str | int | None) -> GroupEntry:
    names = mesh.mesh_dim_names or ()
    axes: list[object] = [*names, *range(-mesh.ndim, mesh.ndim)]
    if (axis is None and mesh.ndim != 1) or (axis is not None and axis not in axes):
        listed = ", ".join(
            f"{names[i] if names else i}({n})" for i, n in enumerate(mesh.mesh.shape)
        )
        raise MeshError.because(
            f"Communicator.of(DeviceMesh, axis={axis!r})",
            f"axes {listed}",
            None,
            f"axis={(names[0] if names else 0)!r}",
        )
    if is_integer(axis):
        axis = axis % mesh.ndim
    return groups.entry_of(mesh.get_group(axis) if axis is not None else mesh.get_group())


def _deadline_of(entry: GroupEntry, timeout_s: float | None) -> float:
    if timeout_s is not None:
        return timeout_s
    environment_s = environment_timeout_s()
    return entry.timeout_s if environment_s is None else environment_s


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _restore(
    ranks: tuple[int, ...],
    backend: str | None,
    device: str,
    timeout_s: float | None,
    world_size: int,
) -> Communicator:
    """Unpickle: the same ranks in this process's world; collective over them if not cached."""
    if world_size != _world_size():
        raise MeshError.because(
            f"a Communicator of ranks {list(ranks)} that was made in a world of {world_size}",
            f"this process is a rank of a world of {_world_size()}",
            f"{world_size} != {_world_size()}",
            "ask for it where it is used: comm = unisono.world() inside the function",
        )
    entry = groups.entry_for(ranks, backend=backend)
    return Communicator(entry, device=torch.device(device), timeout_s=timeout_s)
