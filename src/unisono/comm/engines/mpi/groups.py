"""The backend `mpi4py` of torch.distributed: how ranks come to a communicator of their own.

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
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from unisono.comm.arguments import environment_timeout_s
from unisono.comm.engines.base import Engine, SelfEngine
from unisono.comm.engines.mpi.channel import Channel, Member, Watch
from unisono.comm.engines.mpi.engine import MpiEngine
from unisono.comm.engines.mpi.library import Threads, load
from unisono.comm.engines.shm.rendezvous import Rendezvous
from unisono.comm.health import watchdog
from unisono.comm.lifecycle import say_returned
from unisono.comm.machine import own_card
from unisono.comm.torch.process_group import NcclBeside, TransportProcessGroup
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
            _watch_over(engine)
        beside = NcclBeside(dist.PrefixStore(f"mpi/{nonce}", store), rank, size)
        super().__init__(engine, ranks, timeout, BACKEND, deadline_s, beside)


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
    me = Member(base.rank, base.size, own_card(), socket.gethostname(), secrets.token_hex(8))
    rendezvous = Rendezvous(dist.PrefixStore("mpi", store), rank, ranks, timeout_s, backend=BACKEND)
    try:
        texts = rendezvous.share("member", json.dumps(asdict(me)))
    except BaseException:
        rendezvous.clean()  # who comes later must not take this rank for present
        raise
    members = [Member(**json.loads(text)) for text in texts]
    positions = [member.position for member in members]
    sizes = sorted({member.job_size for member in members})
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
    channel = Channel(mpi, comm, threads, Watch(ranks, rank, members, name))
    channel.timeout_s = timeout_s
    with channel.kernel():
        channel.start(comm.Ibarrier)
        channel.finish()
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

_engines: list[weakref.ref[MpiEngine]] = []
_departing: list[MpiEngine] = []
"""Engines of groups this rank has left, until all others have, too; they keep the group's store."""
_watching_pid: int | None = None


def living() -> list[MpiEngine]:
    """Return the engines of this process, oldest first."""
    return [engine for ref in _engines if (engine := ref()) is not None]


def count() -> int:
    """Return how many communicators this process has not given back yet."""
    sweep()
    return len(_departing) + sum(engine.cause is None for engine in living())


def sweep() -> bool:
    """Free the communicators of groups that everybody has left; return whether all are."""
    _departing[:] = [engine for engine in _departing if not _is_over(engine)]
    return not _departing


def _watch_over(engine: MpiEngine) -> None:
    """Close `engine` when the process ends, if nobody has done so before."""
    global _watching_pid
    if _watching_pid != os.getpid():
        _watching_pid = os.getpid()
        atexit.register(_end)
    _engines[:] = [ref for ref in _engines if ref() is not None]
    _engines.append(weakref.ref(engine))


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
    engines = living()
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
