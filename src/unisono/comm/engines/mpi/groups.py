"""The backend `mpi4py` of torch.distributed: groups of ranks of one MPI job.

Ranks of one host share memory. Those of several hosts get a communicator of their own.

A communicator of mpi4py stands on its own: it has a duplicate, a store that its first rank keeps,
and a watchdog, and needs no torch.distributed. Only where all of its ranks belong to one world of
torch.distributed already, it becomes a group of that world.

Making a communicator blocks inside MPI without a deadline, so ranks meet in the group's store
first, where waiting has one. Only members take part. A rank that leaves says so to the others; when
all have, the communicator is freed. A rank that ends by an exception tells the others before MPI
makes it wait for them, and if they do not end either, it ends the whole job.
"""

from __future__ import annotations

import atexit
import os
import secrets
import signal
import sys
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from unisono import torch_private as private
from unisono.comm import groups, seal
from unisono.comm.arguments import environment_timeout_s
from unisono.comm.engines import transport
from unisono.comm.engines.base import Engine, SelfEngine
from unisono.comm.engines.mpi.channel import Channel, MpiWatch
from unisono.comm.engines.mpi.engine import MpiEngine
from unisono.comm.engines.mpi.library import (
    default_deadline,
    duplicate,
    expect_threads,
    load,
    positions_of,
    share,
    store_of,
)
from unisono.comm.engines.rendezvous import Member, Rendezvous
from unisono.comm.groups import GroupEntry
from unisono.comm.health import watchdog
from unisono.comm.lifecycle import say_returned
from unisono.comm.torch.process_group import TransportProcessGroup
from unisono.errors import MeshError

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


def make_group(
    store: dist.Store,
    rank: int,
    size: int,
    timeout: timedelta,
    ranks: Sequence[int] = (),
    name: str = "",
    *,
    base: MPI.Intracomm | None = None,
) -> TransportProcessGroup:
    """Make a group of ranks of one MPI job. Collective over them.

    Ranks of one host share memory; others get a communicator of their own.

    Args:
        store: where the ranks meet.
        rank: own rank in the group.
        size: ranks of the group.
        timeout: deadline of making the group, and of each call.
        ranks: world ranks of the group; empty means 0 to `size` - 1.
        name: name of the group.
        base: a communicator with all ranks of the group in it; default: that of the world.
    """
    mpi = load()
    deadline_s = environment_timeout_s()
    ranks = tuple(ranks) or tuple(range(size))
    engine: Engine | None = SelfEngine()
    nonce = "alone"
    if size > 1:
        sweep()
        _leave_at_exit()
        whole = _world_communicator(mpi) if base is None else base
        wait_s = timeout.total_seconds()
        rendezvous = Rendezvous(
            dist.PrefixStore("mpi", store), rank, ranks, wait_s, backend=BACKEND
        )
        members = rendezvous.introduce(whole.rank, whole.size)
        positions = _checked_positions(ranks, members)
        engine = rendezvous.share_memory()
        nonce = rendezvous.nonce
        if engine is None:
            watch = MpiWatch(ranks, rank, members, name)
            channel = _open_channel(mpi, whole, positions, watch, wait_s)
            engine = MpiEngine(channel, name, store, _depart)
        rendezvous.clean()
    group_store = dist.PrefixStore(f"mpi/{nonce}", store)
    return TransportProcessGroup(engine, ranks, timeout, BACKEND, deadline_s, group_store)


def _world_communicator(mpi: Any) -> MPI.Intracomm:
    """Return the communicator from which groups are made: that of the world, or all of MPI."""
    world = dist.group.WORLD if dist.is_initialized() else None
    engine = getattr(world, "unisono_engine", None)
    return engine.channel.comm if isinstance(engine, MpiEngine) else mpi.COMM_WORLD


def _checked_positions(ranks: Sequence[int], members: Sequence[Member]) -> list[int]:
    """Return the place of each rank in its MPI job; raise unless that is one and the same."""
    positions = [member.facts[0] for member in members]
    sizes = sorted({member.facts[1] for member in members})
    if len(sizes) > 1 or len(set(positions)) < len(positions):
        raise MeshError.because(
            f"an MPI group of ranks {list(ranks)}",
            f"these processes are ranks {positions} of MPI jobs of {sizes} processes",
            "they are not of one MPI job",
            f"mpiexec -n {len(ranks)} python your_script.py",
        )
    return positions


def _open_channel(
    mpi: Any, base: MPI.Intracomm, positions: list[int], watch: MpiWatch, timeout_s: float
) -> Channel:
    """Return the channel of a new group of ranks of `base`. Collective over it."""
    expect_threads(mpi, f"a group of ranks {list(watch.ranks)}")
    comm = _subset(base, positions, watch.token)
    comm.Set_errhandler(mpi.ERRORS_RETURN)
    channel = Channel(mpi, comm, watch)
    channel.until(comm.Ibarrier().Test, timeout_s)
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

_leaving: list[Callable[[], bool]] = []
"""For each communicator that this rank has left: frees it when all ranks have, and returns whether.

They refer to what must live until then, such as the store that this rank may keep."""
_watching_pid: int | None = None


def sweep() -> bool:
    """Free the communicators that all ranks have left; return whether all are free."""
    _leaving[:] = [is_over for is_over in _leaving if not is_over()]
    return not _leaving


def _leave_at_exit() -> None:
    """Close the engines of this process when it ends, if that has not been done."""
    global _watching_pid
    if _watching_pid != os.getpid():
        _watching_pid = os.getpid()
        atexit.register(_end)


def _depart(engine: MpiEngine) -> None:
    """Leave a group: tell the others, and free those groups that all ranks have left."""
    engine.channel.say_goodbye()
    _leaving.append(partial(_is_over, engine))
    sweep()


def _is_over(engine: MpiEngine) -> bool:
    channel = engine.channel
    if channel.mpi.Is_finalized():
        return True
    try:
        if not channel.have_all_left():
            return False
        if not engine.is_broken:  # else transfers may still be open
            channel.comm.Free()
    except channel.mpi.Exception:
        return engine.is_broken
    return True


def _end() -> None:
    """Leave all groups before MPI is finalized."""
    mpi = load()
    if os.getpid() != _watching_pid:
        return
    error = getattr(sys, "last_value", None)
    engines = transport.living()
    was_in_use = any(not engine.is_closed for engine in engines)
    give_up = time.monotonic() + (PATIENCE_S if error is None else GRACE_S)
    returns = [standalone.arrive() for standalone in _open_standalones]
    if error is None:
        say_returned()
        # Ranks that still wait for this one are to hear that it has returned, not that it has left.
        while not mpi.Request.Testall(returns) and time.monotonic() < give_up:
            time.sleep(1e-3)
    else:
        for engine in engines:
            engine.fail(error)
            engine.cancel("this rank ends with an exception")
    for dog in watchdog.standing():
        dog.stop()  # before the rank that keeps the store may end
    for engine in engines:
        engine.close()
    for standalone in list(_open_standalones):
        standalone.part()
    while not sweep() and time.monotonic() < give_up:
        time.sleep(1e-3)
    if error is not None and not sweep():
        print(
            f"unisono: some ranks did not end within {GRACE_S:g} s of an exception on this one; "
            "the MPI job is aborted",
            file=sys.stderr,
        )
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(_FORWARD_S)
        mpi.COMM_WORLD.Abort(1)
    elif error is not None and was_in_use:
        # MPI does not let this process end before ranks outside of its groups do, which may wait
        # for it. The system's clock ends it then, and so mpiexec the job.
        print(f"unisono: after an exception, the other ranks of MPI have {GRACE_S:g} s to end, too")
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, GRACE_S)


# -- from communicators of mpi4py ----------------------------------------------------------------


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
    positions = positions_of(mpi, comm)
    world = dist.group.WORLD if dist.is_initialized() else None
    if comm.size == 1:
        return groups.alone(positions[0] if world is None else world.rank())
    existing = _standing.get(positions)
    if existing is not None and existing.is_alive():
        return existing
    places = _places.get(world, {}).get(positions) if world is not None else None
    if places is None:
        places = _agree(mpi, comm, world)
        if places is not None and world is not None:
            _places.setdefault(world, {})[positions] = places
    if places is not None:
        engine = getattr(world, "unisono_engine", None)
        is_shared = engine is not None and engine.backend == "shm"  # and so its parts
        return groups.entry_for(places, backend=None if is_shared else BACKEND)
    _standing[positions] = entry = Standalone(mpi, comm, positions).whole
    return entry


_standing: dict[tuple[int, ...], GroupEntry] = {}
"""Groups that stand on their own, by their ranks in MPI.COMM_WORLD.

These alone decide: all ranks must find a group here, or none, whatever worlds they are in.
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
    card = ""
    if world is not None:
        token = watchdog.default_store().compare_set("unisono/world", "", secrets.token_hex(8))
        card = f"{token.decode()} {world.rank()}"
    texts = [text.split() for text in share(mpi, comm, card, default_deadline())]
    if not all(texts) or len({token for token, _ in texts}) > 1:
        return None
    return tuple(int(rank) for _, rank in texts)


_open_standalones: set[Standalone] = set()
"""Those that this rank has not left."""


class Standalone:
    """A communicator of mpi4py and the groups made of it, which torch.distributed does not know.

    Collective over `comm`, which is duplicated and never used itself.

    Args:
        mpi: the module `mpi4py.MPI`.
        comm: the communicator.
        ranks: names of its ranks: their ranks in MPI.COMM_WORLD.
    """

    def __init__(self, mpi: Any, comm: MPI.Intracomm, ranks: tuple[int, ...]) -> None:
        self._deadline_s = default_deadline()
        self._comm = duplicate(mpi, comm, self._deadline_s)
        self._store = store_of(self._comm, timeout_s=self._deadline_s)
        self._rank = ranks[self._comm.rank]
        token = share(mpi, self._comm, secrets.token_hex(4), self._deadline_s)[0]
        self._prefix = f"unisono-{BACKEND}-{token}"
        self._is_over = False
        self._arrival: Any = None
        self._made: dict[tuple[int, ...], GroupEntry] = {}
        self._generation: dict[tuple[int, ...], int] = {}
        signer = seal.Seal(self._store, self._rank)
        self._dog = watchdog.Watchdog(
            self._rank, ranks, self._store, lambda: self._is_over, signed_by=signer
        )
        _open_standalones.add(self)
        self.whole = self.part_of(ranks, self._deadline_s)
        """The group of all ranks of the communicator."""

    def part_of(self, ranks: tuple[int, ...], wait_s: float) -> GroupEntry:
        """Return the group of some of the ranks. Collective over them when it is made."""
        entry = self._made.get(ranks)
        if entry is not None:
            return entry
        nth = self._generation[ranks] = self._generation.get(ranks, 0) + 1
        name = f"{self._prefix}-{'_'.join(map(str, ranks))}-{nth}"
        watchdog.stand(name, self._dog)
        place, timeout = ranks.index(self._rank), timedelta(seconds=wait_s)
        store = dist.PrefixStore(name, self._store)
        try:
            with groups.being_made(name, ranks, BACKEND, wait_s):
                group = make_group(store, place, len(ranks), timeout, ranks, name, base=self._comm)
        except BaseException:
            watchdog.dismiss(name)
            raise
        group.set_timeout(timedelta(seconds=self._deadline_s))
        group._set_group_name(name)
        private.register_group(name, group)
        entry = self._made[ranks] = GroupEntry(group, ranks, made_by_us=True, maker=self)
        return entry

    def release(self, entry: GroupEntry) -> None:
        """Leave a group without references."""
        self._made.pop(entry.ranks, None)
        self._is_over = not self._made
        watchdog.dismiss(entry.key)
        private.unregister_group(entry.key)
        if entry.group is not None:
            entry.group.shutdown()
        if self._is_over:
            self.part()

    def arrive(self) -> Any:
        """Return a request of MPI that is complete when all ranks have come to their end."""
        if self._arrival is None:
            self._arrival = self._comm.Ibarrier()
        return self._arrival

    def part(self) -> None:
        """Leave the communicator, which is freed when all ranks have; so long the store is kept."""
        if self in _open_standalones:
            _open_standalones.discard(self)
            self.arrive()
            departure = self._comm.Ibarrier()

            def is_over() -> bool:
                if has_parted := departure.Test():
                    self._comm.Free()
                return has_parted

            _leaving.append(is_over)
