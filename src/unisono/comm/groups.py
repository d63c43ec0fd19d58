"""The one place where process groups are made: a cache by rank tuple and backend.

Asking twice for the same ranks gives the same group. Only members take part in making one, and its
name follows from its ranks, so ranks may make groups in any order that two of them share.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from unisono import torch_private as private
from unisono.comm import call as calls
from unisono.comm.call import Call
from unisono.comm.engines.base import Engine, SelfEngine, StagedEngine
from unisono.comm.engines.gloo import TorchEngine
from unisono.comm.engines.stream import StreamEngine
from unisono.comm.health import failures, mark_as_news, streams, watchdog
from unisono.comm.health.failures import Meaning, meaning_of
from unisono.comm.health.streams import Lane
from unisono.errors import MeshError, RankFailed, RankTimeout, UnisonoError

if TYPE_CHECKING:
    from unisono.comm.engines.mpi.groups import Standalone

DEFAULT_TIMEOUT_S = 600.0
"""Deadline of a wait where nothing else is said."""
_CPU = torch.device("cpu")
_BESIDE = "gloo"
"""Backend of the CPU group beside a group that serves an accelerator only."""


class Holder:
    """Stands for one communicator that uses a group (communicators compare as values)."""


class GroupEntry:
    """A process group as we use it: ranks, kernels, a counter of calls, and who holds it."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        ranks: tuple[int, ...],
        *,
        made_by_us: bool,
        maker: Standalone | None = None,
    ) -> None:
        self.maker = maker
        """Who has made a group that stands on its own; None for one of torch.distributed."""
        self.group = group
        self.ranks = ranks
        self.made_by_us = made_by_us
        self.rank = group.rank() if group is not None else 0
        self.holders: weakref.WeakSet[Holder] = weakref.WeakSet()
        self.hosts: tuple[str, ...] | None = None
        self.broken: str | None = None
        """Why the group cannot be used any more."""
        self.verdict: UnisonoError | None = None
        """The error that says so, where it was found while no call waited: each call raises it."""
        self.is_forked = False
        """Whether that is because this process was forked from the rank that made it."""
        world = dist.group.WORLD
        if maker is None and _parents_world is not None and _parents_world() is world is not None:
            self.mark_forked()
        self.single: dist.ProcessGroup | None = None
        self.turn: threading.RLock | None = threading.RLock()
        """Held by the thread that is inside a collective; None where threads are let in as they
        come."""
        self.inside = 0
        """Identity of the thread that took it last."""
        self.collectives = 0
        """Collectives of the group that this rank has begun."""
        self.counted: dict[str, int] = {}
        """What else users of the group count."""
        self.sent: dict[tuple[int, int], int] = {}
        """Messages that this rank has begun to send, by world rank and tag."""
        self.awaited: dict[tuple[int, int], int] = {}
        """Messages that it has begun to receive."""
        self._engines: dict[tuple[str, str], Engine] = {}
        self._timeout_s: float | None = None
        self.name = self._name()
        """Name for traces and reports, the same on all members."""
        self.key = "self" if group is None else str(group.group_name)
        """Name under which torch.distributed knows the group, the same on all members."""
        if maker is not None:
            _by_key[self.key] = self
        elif group is not None and len(ranks) > 1:
            watchdog.ensure()

    def mark_forked(self) -> None:
        """Refuse further use, in a process that was forked from the rank; one alone goes on."""
        if self.group is not None:
            self.is_forked = True
            self.broken = f"process {os.getpid()} was forked from a rank that had made it"

    def _name(self) -> str:
        if self.group is None:
            return "self"
        if self.group is dist.group.WORLD:
            return "world"
        return f"ranks {','.join(map(str, self.ranks))} ({self.backend(self.default_device())})"

    @property
    def timeout_s(self) -> float:
        """Deadline the group was made with."""
        if self.group is None:
            return DEFAULT_TIMEOUT_S
        if self._timeout_s is not None:
            return self._timeout_s
        backend = self.group._get_backend(torch.device(next(iter(self._devices()), "cpu")))
        timeout = getattr(getattr(backend, "options", None), "_timeout", None)
        return timeout.total_seconds() if isinstance(timeout, timedelta) else DEFAULT_TIMEOUT_S

    def _devices(self) -> list[str]:
        if self.group is None:
            return ["cpu"]
        return [device.type for device in self.group._device_types]

    def is_alive(self) -> bool:
        """Whether torch.distributed, or its own maker, still knows the group."""
        if self.maker is not None:
            return _by_key.get(self.key) is self
        return self.group is None or self.group in private.known_groups

    def backend(self, device: torch.device) -> str:
        """Name of the backend that serves tensors on `device`."""
        if self.group is None or len(self.ranks) == 1:
            return "self"
        if self._has_streams(device):
            return private.backends_of(self.group)[device.type]
        engine = getattr(self.group, "unisono_engine", None)
        if isinstance(engine, Engine):
            return engine.backend
        # Host memory, and tensors that travel through it.
        return self.group._get_backend(_CPU).name() if "cpu" in self._devices() else _BESIDE

    def _has_streams(self, device: torch.device) -> bool:
        """Whether a backend that works on streams of `device` serves the group."""
        if self.group is None or device.type == "cpu":
            return False
        name = private.backends_of(self.group).get(device.type)
        return name is not None and "cpu" not in dist.Backend.backend_capability.get(name, ())

    def serves(self, device: torch.device) -> bool:
        """Whether the group has a backend of its own for tensors on `device`."""
        return self._has_streams(device) or (device.type == "cpu" and "cpu" in self._devices())

    def default_device(self) -> torch.device:
        """Where tensors of this group are expected unless said otherwise."""
        default, devices = torch.accelerator.current_accelerator(), self._devices()
        if "cpu" in devices or default is None or default.type not in devices:
            return _CPU
        return torch.device(default.type, torch.accelerator.current_device_index())

    def engine(self, device: torch.device) -> Engine:
        """Return the kernels for tensors on `device`.

        Local, except for host memory in a group that has no backend for it: the first time is
        collective over the group.
        """
        key = self.backend(device), device.type
        if key not in self._engines:
            self._engines[key] = self._make_engine(key[0], device)
        return self._engines[key]

    def _make_engine(self, backend: str, device: torch.device) -> Engine:
        if self.group is None or len(self.ranks) == 1:
            return SelfEngine()
        if self._has_streams(device):
            self._timeout_s = self.timeout_s  # the engine changes that of the backend
            host, report = partial(self.engine, _CPU), self._end
            inner = getattr(self.group, "inner_group", None)
            group = self.group if inner is None else inner(device)
            lane = Lane(self.key, self.ranks, group._get_backend(device).abort, report)
            return StreamEngine(group, backend, device, self._timeout_s, host, lane)
        if device.type != "cpu":
            return StagedEngine(self.engine(_CPU))
        if "cpu" not in self._devices():
            return entry_for(self.ranks, backend=_BESIDE).engine(_CPU)
        engine = getattr(self.group, "unisono_engine", None)
        return engine if isinstance(engine, Engine) else TorchEngine(self.group, backend)

    def is_cause(self, error: BaseException, engine: Engine) -> bool:
        """Whether an error has broken the group, as `engine` or another one of it knows."""
        return any(error is other.cause for other in (engine, *self._engines.values()))

    def _end(self, error: UnisonoError) -> None:
        """Mark the group as unusable because of an error that was found while no call waited."""
        self.broken, self.verdict = str(error).partition("\n")[0], error


# -- a world that waits for its first use ---------------------------------------------------------
# A launcher of scripts leaves it to them how they begin: one that initialises torch.distributed by
# itself brings its own group, and that is the world; in others the first use of the world joins it.

_waiting: tuple[Callable[[], None], dist.Store] | None = None
"""How the world of this process is joined, and the store at which its ranks meet."""


def join_at_first_use(join: Callable[[], None], store: dist.Store) -> None:
    """Have `join` start torch.distributed at the first use of the world, unless the script has."""
    global _waiting
    _waiting = join, store


def has_world() -> bool:
    """Whether torch.distributed is initialised here.

    Local, except in a world that waits for its first use: this is it, collective over that world.
    """
    if not dist.is_initialized() and _waiting is not None:
        _waiting[0]()
    return dist.is_initialized()


def store_of_world() -> dist.Store | None:
    """Return the store of this world, joined or not; None in a process on its own. Local."""
    if dist.is_initialized():
        return watchdog.default_store()
    return None if _waiting is None else _waiting[1]


_parents_world: weakref.ref[dist.ProcessGroup] | None = None
"""In a process forked from a rank: the world of that rank."""


def _after_fork() -> None:
    """In the child: the connections are those of the parent, and using them would mix both up."""
    global _parents_world, _waiting
    _waiting = None  # a forked process is not the rank, and must not join in its place
    _parents_world = None if dist.group.WORLD is None else weakref.ref(dist.group.WORLD)
    for entry in (*_made.values(), *_by_key.values()):
        entry.mark_forked()


os.register_at_fork(after_in_child=_after_fork)

_made: dict[tuple[tuple[int, ...], str], GroupEntry] = {}
_by_key: dict[str, GroupEntry] = {}
"""All groups that are known; those that stand on their own outlive worlds."""
_generation: dict[tuple[tuple[int, ...], str], int] = {}
_world_seen: weakref.ref[dist.ProcessGroup] | None = None
_forgetting: list[Callable[[], None]] = []
_alone = GroupEntry(None, (0,), made_by_us=False)


def entry_of(group: dist.ProcessGroup) -> GroupEntry:
    """Return the entry of an existing group. Local."""
    forget_ended()
    key = str(group.group_name)
    entry = _by_key.get(key)
    if entry is None or entry.group is not group:
        entry = GroupEntry(group, tuple(dist.get_process_group_ranks(group)), made_by_us=False)
        _by_key[key] = entry
    return entry


def world_entry() -> GroupEntry:
    """Return the entry of the default group, or of this process alone.

    Local, except as the first use of a world that waits for it (`first_use`).
    """
    world = dist.group.WORLD if has_world() else None
    return entry_of(world) if world is not None else _alone


def entry_for(
    ranks: tuple[int, ...], *, backend: str | None = None, wait_s: float | None = None
) -> GroupEntry:
    """Return the group of these world ranks, made if it is not there yet.

    Collective over `ranks` (only they call it) when it is made; local afterwards.

    Args:
        ranks: world ranks, in the order they have in the group.
        backend: name of the backend; default: that of the world.
        wait_s: how long to wait for the others to come; default: the deadline of the world.
    """
    forget_ended()
    if len(ranks) == 1:
        return alone(ranks[0])
    world = dist.group.WORLD
    if world is None:
        raise MeshError.because(
            f"a group of ranks {list(ranks)}",
            "torch.distributed is not initialised: this process is a world of one rank",
            None,
            "start the function with unisono.run(fn, ranks=...)",
        )
    world_backend = str(dist.get_backend(world))
    backend = backend or world_backend
    if ranks == tuple(range(world.size())) and backend == world_backend:
        return world_entry()
    entry = _made.get((ranks, backend))
    if entry is None:
        deadline = world_entry().timeout_s
        group = _new_group(ranks, backend, deadline, wait_s or deadline)
        entry = _made[ranks, backend] = GroupEntry(group, ranks, made_by_us=True)
        _by_key[entry.key] = entry
    return entry


def part_of(whole: GroupEntry, ranks: tuple[int, ...], *, wait_s: float) -> GroupEntry:
    """Return the group of some ranks of `whole`, made as that was if it is not there yet.

    Collective over `ranks` (only they call it) when it is made; local afterwards.

    Args:
        whole: a group.
        ranks: world ranks among those of `whole`, in the order they have in the new group.
        wait_s: how long to wait for the others to come.
    """
    if whole.maker is not None:
        return alone(ranks[0]) if len(ranks) == 1 else whole.maker.part_of(ranks, wait_s)
    backend = None if whole.group is None else str(dist.get_backend(whole.group))
    return entry_for(ranks, backend=backend, wait_s=wait_s)


def alone(rank: int) -> GroupEntry:
    """Return the entry of a group of this one rank; needs no process group."""
    if rank == 0 and not dist.is_initialized():
        return _alone
    key = (rank,), "self"
    if key not in _made:
        _made[key] = GroupEntry(None, (rank,), made_by_us=False)
    return _made[key]


def process_group_of(entry: GroupEntry) -> dist.ProcessGroup:
    """Return the group of `entry`; for a rank alone one is made, since torch wants it. Local."""
    world = dist.group.WORLD
    if entry.group is not None:
        return entry.group
    if world is None:
        raise MeshError.because(
            "a process group of this rank alone",
            "torch.distributed is not initialised",
            None,
            "unisono.run(fn, ...), or torch.distributed.init_process_group",
        )
    if world.size() == 1:
        return world
    if entry.single is None or entry.single not in private.known_groups:
        backend = str(dist.get_backend(world))
        entry.single = _new_group(entry.ranks, backend, DEFAULT_TIMEOUT_S, DEFAULT_TIMEOUT_S)
    return entry.single


def release(entry: GroupEntry) -> None:
    """Destroy `entry`'s group if we made it and no communicator uses it."""
    if not entry.made_by_us or entry.holders or entry.group is None:
        return
    is_alive = entry.is_alive()
    _by_key.pop(entry.key, None)
    for key in [key for key, made in _made.items() if made is entry]:
        del _made[key]
    if is_alive and entry.maker is not None:
        entry.maker.release(entry)
    elif is_alive:
        dist.destroy_process_group(entry.group)


def count() -> int:
    """Return how many groups this cache has made and still keeps."""
    forget_ended()
    return sum(entry.made_by_us for entry in _by_key.values())


def forget_ended() -> None:
    """Let go of groups that were destroyed; a new world starts with an empty cache. Local."""
    global _world_seen
    world = dist.group.WORLD if dist.is_initialized() else None
    has_ended = (None if _world_seen is None else _world_seen()) is not world
    _drop_ended(_made, has_ended)
    _drop_ended(_by_key, has_ended)
    if has_ended:
        _generation.clear()
        calls.latest_call = None
        streams.forget()
        for forget in _forgetting:
            forget()
        _world_seen = None if world is None else weakref.ref(world)


def _drop_ended(cache: dict[Any, GroupEntry], world_has_ended: bool) -> None:
    for key, entry in list(cache.items()):
        if (world_has_ended and entry.maker is None) or not entry.is_alive():
            del cache[key]


def when_forgotten(forget: Callable[[], None]) -> Callable[[], None]:
    """Call `forget` whenever a world has ended: for names that outlive worlds. Local.

    Whatever still refers to a group of an ended world keeps its connections open.
    """
    _forgetting.append(forget)
    return forget


def accounts() -> dict[str, dict[str, int]]:
    """Return for each group, by its key, what this rank has made and counted in it. Local."""
    counts = {
        f"{group.group_name}/c10d": {"collectives": made}
        for group in list(private.known_groups)
        # of a group of ours: torch's own calls on it
        if (made := getattr(group, "unisono_calls", None)) is not None
    }
    for key, entry in _living().items():
        sent = {calls.sent_to(*to): number for to, number in entry.sent.items()}
        counts[key] = {"collectives": entry.collectives, **entry.counted, **sent}
    return counts


def collectives_begun() -> dict[str, int]:
    """Return how many collectives of each group this rank has begun. Local, from any thread."""
    return {key: entry.collectives for key, entry in _living().items()}


def _living() -> dict[str, GroupEntry]:
    return {key: entry for key, entry in list(_by_key.items()) if entry.is_alive()}


def is_broken() -> bool:
    """Whether a group of this rank has failed, so that ranks may not meet any more. Local."""
    return any(
        entry.broken is not None or getattr(entry.group, "failure", None) is not None
        for entry in _living().values()
    )


@contextlib.contextmanager
def being_made(name: str, ranks: tuple[int, ...], backend: str, wait_s: float) -> Iterator[None]:
    """Make the group `name` inside; errors are those of every call."""
    call = Call(failures.NEW_GROUP, backend, name, kind=f"ranks {list(ranks)}")
    calls.latest_call = call
    try:
        yield
    except RankFailed as error:
        raise mark_as_news(error) from None
    except (RuntimeError, RankTimeout) as error:
        if isinstance(error, RankTimeout) or meaning_of(error) is Meaning.LATE:
            raise failures.timed_out(call, ranks, wait_s, error) from None
        if isinstance(error, dist.DistNetworkError):  # the rank that holds the store is gone
            raise failures.connection_lost(call, str(error)) from None
        raise
    call.done = True


def _new_group(
    ranks: tuple[int, ...], backend: str, timeout_s: float, wait_s: float
) -> dist.ProcessGroup:
    """Make a group of which only the members know; its name follows from its ranks alone."""
    nth = _generation.get((ranks, backend), 0)
    _generation[ranks, backend] = nth + 1
    name = f"unisono-{backend}-{'_'.join(map(str, ranks))}-{nth}"
    with being_made(name, ranks, backend, wait_s):
        group = private.new_group(name, ranks, backend, timedelta(seconds=wait_s))
    if wait_s != timeout_s:
        group.set_timeout(timedelta(seconds=timeout_s))
    return group
