"""The backend `mpi4py` of torch.distributed: how ranks come to a communicator of their own.

A communicator of mpi4py stands on its own: it has a duplicate for its traffic, a store that its
first rank keeps, and a watchdog, and needs no torch.distributed. Only where all of its ranks belong
to one world of torch.distributed already, it becomes a group of that world.

Making a communicator blocks inside MPI without a deadline, so ranks meet in the group's store
first, where waiting has one. Only members take part. A rank that leaves says so to the others; when
all have, the communicator is freed. A rank that ends by an exception tells the others before MPI
makes it wait for them, and if they do not end either, it ends the whole job.
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
import signal
import socket
import sys
import time
import weakref
import zlib
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from unisono.comm import groups, seal
from unisono.comm.arguments import environment_timeout_s
from unisono.comm.engines import queued
from unisono.comm.engines.base import Engine, SelfEngine
from unisono.comm.engines.mpi.channel import Channel, MpiWatch
from unisono.comm.engines.mpi.engine import MpiEngine
from unisono.comm.engines.mpi.library import Threads, load, unavailable
from unisono.comm.engines.shm.rendezvous import Rendezvous
from unisono.comm.groups import DEFAULT_TIMEOUT_S, GroupEntry
from unisono.comm.health import watchdog
from unisono.comm.lifecycle import say_returned
from unisono.comm.machine import first_reachable, host_id, own_addresses
from unisono.comm.torch import private
from unisono.comm.torch.process_group import TransportProcessGroup
from unisono.environment import Environment
from unisono.errors import MeshError, RankTimeout, UnisonoError

if TYPE_CHECKING:
    from mpi4py import MPI

BACKEND = "mpi4py"
"""Name under which torch.distributed knows the transport."""
GRACE_S = 10.0
"""Time that other ranks have to end after an exception on this one, before the job is aborted."""
PATIENCE_S = 60.0
"""Time to wait for other ranks when all is well; MPI itself waits after that."""
_FORWARD_S = 0.3
"""Time for mpiexec to pass on what was printed; an abort throws away the rest."""
_GROUP_TAGS = 32768
"""`Create_group` may use tags below this one with every MPI."""


class MpiProcessGroup(TransportProcessGroup):
    """Ranks of one MPI job pass tensors over a communicator of their own.

    Collective over the ranks of the group when it is made.

    Args:
        store: where the ranks meet.
        rank: own rank in the group.
        size: ranks of the group.
        timeout: deadline of making the group, and of each call.
        ranks: world ranks of the group; empty means 0 to `size` - 1.
        name: name of the group.
        base: a communicator with all ranks of the group in it; default: that of the world.
        is_own: whether `base` was made for this group, to be used as it is.
    """

    communicator: MPI.Intracomm | None
    """The communicator; None in a group of one rank."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: timedelta,
        ranks: Sequence[int] = (),
        name: str = "",
        *,
        base: MPI.Intracomm | None = None,
        is_own: bool = False,
    ) -> None:
        mpi = load()
        deadline_s = environment_timeout_s()
        ranks = tuple(ranks) or tuple(range(size))
        self.communicator = None
        engine: Engine = SelfEngine()
        nonce = "alone"
        if size > 1:
            sweep()
            whole = _world_communicator(mpi) if base is None else base
            wait_s = timeout.total_seconds()
            channel = _meet(mpi, store, rank, ranks, name, wait_s, whole, is_own=is_own)
            nonce = channel.watch.token
            self.communicator = channel.comm
            engine = MpiEngine(channel, name, store, _depart)
            _leave_at_exit()
        own = dist.PrefixStore(f"mpi/{nonce}", store)
        super().__init__(engine, ranks, timeout, BACKEND, deadline_s, own)


def _world_communicator(mpi: Any) -> MPI.Intracomm:
    """Return the communicator from which groups are made: that of the world, or all of MPI."""
    world = dist.group.WORLD if dist.is_initialized() else None
    if isinstance(world, MpiProcessGroup) and world.communicator is not None:
        return world.communicator
    return mpi.COMM_WORLD


def _meet(
    mpi: Any,
    store: dist.Store,
    rank: int,
    ranks: Sequence[int],
    name: str,
    timeout_s: float,
    base: MPI.Intracomm,
    *,
    is_own: bool,
) -> Channel:
    """Return the channel of a new group. Collective over it."""
    threads = Threads(mpi)
    threads.check("a new group")
    rendezvous = Rendezvous(dist.PrefixStore("mpi", store), rank, ranks, timeout_s, backend=BACKEND)
    members = rendezvous.introduce(base.rank, base.size)
    positions = [member.facts[0] for member in members]
    sizes = sorted({member.facts[1] for member in members})
    if len(sizes) > 1 or len(set(positions)) < len(positions):
        raise MeshError.because(
            f"an MPI group of ranks {list(ranks)}",
            f"these processes are ranks {positions} of MPI jobs of {sizes} processes",
            "they are not of one MPI job",
            f"mpiexec -n {len(ranks)} python your_script.py",
        )
    with threads.lock:
        comm = base
        if not is_own or positions != list(range(base.size)):
            comm = _subset(base, positions, members[0].nonce)
        comm.Set_errhandler(mpi.ERRORS_RETURN)
    channel = Channel(mpi, comm, threads, MpiWatch(ranks, rank, members, name))
    channel.timeout_s = timeout_s
    channel.run(channel.barrier)
    rendezvous.clean()
    return channel


def _subset(base: MPI.Intracomm, positions: Sequence[int], nonce: str) -> MPI.Intracomm:
    """Return a communicator of these ranks of `base`, in this order.

    Never by `Dup`, even for all of them: `base` may be busy with a collective in another thread,
    and `Dup` is one too, so ranks could do the two in different orders.
    """
    whole = base.Get_group()
    chosen = whole.Incl(list(positions))
    try:
        return base.Create_group(chosen, zlib.crc32(nonce.encode()) % _GROUP_TAGS)
    finally:
        chosen.Free()
        whole.Free()


# -- leaving ------------------------------------------------------------------------------------

_departing: list[MpiEngine] = []
"""Engines of groups this rank has left, until all others have, too; they keep the group's store."""
_watching_pid: int | None = None


def _living() -> list[MpiEngine]:
    return [engine for engine in queued.living() if isinstance(engine, MpiEngine)]


def count() -> int:
    """Return how many communicators this process has not given back yet."""
    sweep()
    return len(_departing) + sum(engine.cause is None for engine in _living())


def sweep() -> bool:
    """Free the communicators of groups that everybody has left; return whether all are."""
    _departing[:] = [engine for engine in _departing if not _is_over(engine)]
    return not _departing


def _leave_at_exit() -> None:
    """Close the engines of this process when it ends, if nobody has done so before."""
    global _watching_pid
    if _watching_pid != os.getpid():
        _watching_pid = os.getpid()
        atexit.register(_end)


def _depart(engine: MpiEngine) -> None:
    """Leave a group: tell the others, and free those groups that everybody has left."""
    engine.channel.say_goodbye()
    _departing.append(engine)
    sweep()


def _is_over(engine: MpiEngine) -> bool:
    """Whether all ranks have left; then the communicator is freed."""
    channel = engine.channel
    if channel.mpi.Is_finalized():
        return True
    try:
        if not channel.has_everybody_left():
            return False
        if not engine.is_broken:  # else transfers may still be open
            with channel.threads.lock:
                channel.comm.Free()
    except channel.mpi.Exception:
        return engine.is_broken
    return True


def _end() -> None:
    """Leave all groups before MPI is finalized."""
    if os.getpid() != _watching_pid:
        return
    error = getattr(sys, "last_value", None)
    engines = _living()
    was_in_use = any(not engine.is_closed for engine in engines)
    if error is None:
        say_returned()
    else:
        for engine in engines:
            engine.fail(error)
            engine.cancel("this rank ends with an exception")
    for dog in watchdog.standing():
        dog.stop()  # before the rank that keeps the store may end
    for engine in engines:
        engine.close()
    give_up = time.monotonic() + (PATIENCE_S if error is None else GRACE_S)
    while not sweep() and time.monotonic() < give_up:
        time.sleep(1e-3)
    if error is not None and _departing:
        print(
            f"unisono: some ranks did not end within {GRACE_S:g} s of an exception on this one; "
            "the MPI job is aborted",
            file=sys.stderr,
        )
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(_FORWARD_S)
        _departing[0].channel.mpi.COMM_WORLD.Abort(1)
    elif error is not None and was_in_use:
        # MPI does not let this process end before ranks outside of its groups do, which may wait
        # for it. The system's clock ends it then, and so mpiexec the job.
        print(f"unisono: after an exception, the other ranks of MPI have {GRACE_S:g} s to end, too")
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, GRACE_S)


# -- from communicators of mpi4py; stores whose address travels over MPI -----------------------

_ADDRESSES = 8
"""How many addresses of a host the others are told."""
_TEXT_BYTES = 1024
"""Longest text that ranks share."""


def store_for(environment: Environment, *, timeout_s: float) -> dist.Store | None:
    """Return a store for the world of `environment` whose address travels over MPI.

    Collective over that world. None where mpi4py is not installed, or where MPI does not know the
    same ranks.
    """
    if unavailable() is not None:
        return None
    everybody = load().COMM_WORLD
    if (everybody.rank, everybody.size) != (environment.rank, environment.size):
        return None
    return store_of(everybody, timeout_s=timeout_s)


def store_of(comm: MPI.Intracomm, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> dist.Store:
    """Return a store that rank 0 of `comm` hosts and all its ranks have joined.

    Collective over `comm`. The system gives rank 0 a free port, which it keeps; the address and a
    token by which the store is known travel over MPI.
    """
    from unisono.comm.lifecycle import open_store  # which imports the transports

    mpi = load()
    hosts = set(_share(mpi, comm, host_id(), timeout_s))
    here = Environment(
        kind="unisono", rank=comm.rank, size=comm.size, nodes=len(hosts), local_size=comm.size
    )
    if comm.rank == 0:
        nonce = secrets.token_hex(16)
        store = open_store(here, timeout_s=timeout_s, nonce=nonce)
        found = ["127.0.0.1"] if len(hosts) == 1 else own_addresses() or [socket.gethostname()]
        port = store.port  # type: ignore[attr-defined]
        _share(mpi, comm, json.dumps([found[:_ADDRESSES], port, nonce]), timeout_s)
        return store
    found, port, nonce = json.loads(_share(mpi, comm, "", timeout_s)[0])
    addr = found[0] if len(found) == 1 else first_reachable(found, port)
    return open_store(here, addr=addr, port=port, timeout_s=timeout_s, nonce=nonce)


def entry_of(comm: Any) -> GroupEntry:
    """Return the group of the ranks of an mpi4py communicator.

    Collective over `comm` when its ranks are seen for the first time; local afterwards.
    """
    mpi = load()
    if comm == mpi.COMM_NULL:
        raise MeshError.because(
            "Communicator.of(MPI.COMM_NULL)",
            "this rank is in no group; Split with MPI.UNDEFINED gives it",
            None,
            "if comm != MPI.COMM_NULL: Communicator.of(comm)",
        )
    if not isinstance(comm, mpi.Intracomm):
        raise MeshError.because(
            f"Communicator.of({type(comm).__name__})",
            "it joins two groups of ranks",
            None,
            "Communicator.of(comm.Merge())",
        )
    positions = _positions(mpi, comm)
    world = dist.group.WORLD if dist.is_initialized() else None
    if comm.size == 1:
        return groups.alone(positions[0] if world is None else world.rank())
    known = _standing.get(positions)
    if known is not None and known.is_alive():
        return known
    places = _places.get(world, {}).get(positions) if world is not None else None
    if places is None:
        places = _agree(mpi, comm, world)
        if places is not None and world is not None:
            _places.setdefault(world, {})[positions] = places
    if places is not None:
        return groups.entry_for(places, backend=BACKEND)
    _standing[positions] = entry = Standalone(mpi, comm, positions).whole
    return entry


_standing: dict[tuple[int, ...], GroupEntry] = {}
"""Groups that stand on their own, by their ranks in MPI.COMM_WORLD.

These alone decide: all ranks must find a group here, or none, whichever worlds they are in.
"""
_places: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], tuple[int, ...]]] = (
    weakref.WeakKeyDictionary()
)
"""For each world of torch.distributed, the world ranks of communicators seen in it."""


def _agree(mpi: Any, comm: MPI.Intracomm, world: Any) -> tuple[int, ...] | None:
    """Return the world ranks of `comm`; None unless all of its ranks are in one world.

    Collective over `comm`: a rank cannot know whether the others have initialised
    torch.distributed, and with whom.
    """
    mine = ""
    if world is not None:
        token = watchdog.default_store().compare_set("unisono/world", "", secrets.token_hex(8))
        mine = f"{token.decode()} {world.rank()}"
    texts = [text.split() for text in _share(mpi, comm, mine, _default_deadline())]
    if not all(texts) or len({token for token, _ in texts}) > 1:
        return None
    return tuple(int(rank) for _, rank in texts)


class Standalone:
    """A communicator of mpi4py and the groups made of it, which torch.distributed does not know.

    Collective over `comm`, which is duplicated and never used itself.

    Args:
        mpi: the module `mpi4py.MPI`.
        comm: the communicator.
        ranks: names of its ranks: their ranks in MPI.COMM_WORLD.
    """

    def __init__(self, mpi: Any, comm: MPI.Intracomm, ranks: tuple[int, ...]) -> None:
        self._deadline_s = _default_deadline()
        with Threads(mpi).lock:
            own, request = comm.Idup()
        _finish(mpi, request, self._deadline_s)
        self._store = store_of(own, timeout_s=self._deadline_s)
        self._rank = ranks[own.rank]
        token = _share(mpi, own, secrets.token_hex(4), self._deadline_s)[0]
        self._prefix = f"unisono-{BACKEND}-{token}"
        self._is_over = False
        self._made: dict[tuple[int, ...], GroupEntry] = {}
        self._generation: dict[tuple[int, ...], int] = {}
        signer = seal.Seal(self._store, self._rank)
        self._dog = watchdog.Watchdog(
            self._rank, ranks, self._store, lambda: self._is_over, signed_by=signer
        )
        self.whole = self._make(ranks, self._deadline_s, own, is_own=True)
        """The group of all ranks of the communicator."""

    def part(self, whole: GroupEntry, ranks: tuple[int, ...], wait_s: float) -> GroupEntry:
        """Return the group of some ranks of `whole`. Collective over them when it is made."""
        entry = self._made.get(ranks)
        if entry is None:
            base = whole.group.communicator if isinstance(whole.group, MpiProcessGroup) else None
            entry = self._make(ranks, wait_s, base, is_own=False)
        return entry

    def _make(
        self, ranks: tuple[int, ...], wait_s: float, base: MPI.Intracomm | None, *, is_own: bool
    ) -> GroupEntry:
        nth = self._generation[ranks] = self._generation.get(ranks, 0) + 1
        name = f"{self._prefix}-{'_'.join(map(str, ranks))}-{nth}"
        watchdog.stand(name, self._dog)
        place, timeout = ranks.index(self._rank), timedelta(seconds=wait_s)
        store = dist.PrefixStore(name, self._store)
        try:
            with groups.being_made(name, ranks, BACKEND, wait_s):
                group = MpiProcessGroup(
                    store, place, len(ranks), timeout, ranks, name, base=base, is_own=is_own
                )
        except BaseException:
            watchdog.dismiss(name)
            raise
        group.set_timeout(timedelta(seconds=self._deadline_s))
        group._set_group_name(name)
        private.register_group(name, group)
        entry = self._made[ranks] = GroupEntry(group, ranks, made_by_us=True, maker=self)
        return entry

    def release(self, entry: GroupEntry) -> None:
        """Leave a group that nobody holds any more."""
        self._made.pop(entry.ranks, None)
        self._is_over = not self._made
        watchdog.dismiss(entry.key)
        private.unregister_group(entry.key)
        if entry.group is not None:
            entry.group.shutdown()


def _positions(mpi: Any, comm: MPI.Intracomm) -> tuple[int, ...]:
    """Return the rank in MPI.COMM_WORLD of each rank of `comm`."""
    mine, everybody = comm.Get_group(), mpi.COMM_WORLD.Get_group()
    try:
        found = tuple(mine.Translate_ranks(None, everybody))
    finally:
        mine.Free()
        everybody.Free()
    if mpi.UNDEFINED in found:
        raise MeshError.because(
            f"Communicator.of(an MPI communicator of {comm.size} ranks)",
            f"ranks {[place for place, rank in enumerate(found) if rank == mpi.UNDEFINED]} of it "
            "were not started together with this one (they have another MPI.COMM_WORLD)",
            None,
            "start all ranks with one mpiexec -n",
        )
    return found


def _share(mpi: Any, comm: MPI.Intracomm, text: str, timeout_s: float) -> list[str]:
    """Return the texts of all ranks of `comm`."""
    data = text.encode()
    if len(data) > _TEXT_BYTES:
        raise UnisonoError(f"{text[:80]!r}... is too long to be shared ({len(data)} bytes)")
    everybody = bytearray(_TEXT_BYTES * comm.size)
    with Threads(mpi).lock:
        request = comm.Iallgather([data.ljust(_TEXT_BYTES), mpi.BYTE], [everybody, mpi.BYTE])
    _finish(mpi, request, timeout_s)
    starts = range(0, len(everybody), _TEXT_BYTES)
    return [everybody[begin : begin + _TEXT_BYTES].decode().rstrip() for begin in starts]


def _finish(mpi: Any, request: Any, timeout_s: float) -> None:
    give_up, lock = time.monotonic() + timeout_s, Threads(mpi).lock
    nap_s = 20e-6
    while True:
        with lock:
            if request.Test():
                return
        if time.monotonic() > give_up:
            raise RankTimeout(
                f"making a group of an MPI communicator on rank {mpi.COMM_WORLD.rank} of MPI "
                f"timed out after {timeout_s:g} s\n"
                "  not all ranks of the communicator have called Communicator.of(comm)",
                op="new_group",
            )
        time.sleep(nap_s)
        nap_s = min(nap_s * 1.5, 200e-6)


def _default_deadline() -> float:
    given = environment_timeout_s()
    return DEFAULT_TIMEOUT_S if given is None else given
