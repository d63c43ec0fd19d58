"""A world from an mpi4py communicator, and communicators of ours from those of mpi4py."""

from __future__ import annotations

import atexit
import json
import secrets
import socket
import sys
import time
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from unisono.comm import groups
from unisono.comm.addresses import first_reachable, own_addresses
from unisono.comm.arguments import environment_timeout_s
from unisono.comm.environment import Environment
from unisono.comm.groups import DEFAULT_TIMEOUT_S, GroupEntry
from unisono.comm.hosts import host_id
from unisono.comm.transports.mpi import process_group
from unisono.comm.transports.mpi.library import Threads, load, unavailable
from unisono.comm.transports.mpi.process_group import MpiProcessGroup
from unisono.errors import MeshError, RankTimeout, UnisonoError

if TYPE_CHECKING:
    from mpi4py import MPI

BACKEND = "mpi4py"
"""Name under which torch.distributed knows the transport."""

_ADDRESSES = 8
"""How many addresses of a host the others are told."""
_world_ranks: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], tuple[int, ...]]] = (
    weakref.WeakKeyDictionary()
)


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
    word by which the store is known travel over MPI.
    """
    from unisono.comm.start import open_store  # which imports the transports

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


def start_world(comm: MPI.Intracomm | None = None, *, timeout_s: float | None = None) -> GroupEntry:
    """Initialise torch.distributed with the ranks of `comm` and return its default group.

    Collective over `comm`, which is duplicated and never used itself. The world is closed when
    the process ends, unless that has been done before.

    Args:
        comm: default: `MPI.COMM_WORLD`.
        timeout_s: deadline of the start and of each collective; default: `UNISONO_TIMEOUT_S`,
            else 600 s.
    """
    mpi = load()
    whole = mpi.COMM_WORLD if comm is None else comm
    deadline = _default_deadline() if timeout_s is None else timeout_s
    with Threads(mpi).lock:
        own, request = whole.Idup()
    _finish(mpi, request, deadline, "the start of a world")
    store = store_of(own, timeout_s=deadline)
    process_group.offer(own)
    try:
        dist.init_process_group(
            BACKEND,
            store=dist.PrefixStore("unisono/mpi", store),
            rank=own.rank,
            world_size=own.size,
            timeout=timedelta(seconds=deadline),
        )
    finally:
        process_group.offer(None)
    global _leaves_at_exit
    if not _leaves_at_exit:
        _leaves_at_exit = True
        atexit.register(_leave)
    return groups.world_entry()


_leaves_at_exit = False


def _leave() -> None:
    """Close the world together, unless this rank ends with an exception or its world is broken."""
    world = dist.group.WORLD if dist.is_initialized() else None
    if getattr(sys, "last_value", None) is not None or not isinstance(world, MpiProcessGroup):
        return
    if getattr(world.unisono_engine, "cause", None) is None:
        from unisono.comm.start import stop_world

        stop_world()


def entry_of(comm: Any) -> GroupEntry:
    """Return the group of the ranks of an mpi4py communicator.

    Collective over `comm` when it is seen for the first time. If torch.distributed is not
    initialised, the ranks of `comm` become its world.
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
    if comm.size == 1:
        return groups.alone(dist.get_rank() if dist.is_initialized() else 0)
    if not dist.is_initialized():
        return start_world(comm)
    return groups.entry_for(_ranks_in_world(mpi, comm), backend=BACKEND)


def _ranks_in_world(mpi: Any, comm: MPI.Intracomm) -> tuple[int, ...]:
    """Return the world rank of each rank of `comm`."""
    world = dist.group.WORLD
    if isinstance(world, MpiProcessGroup) and world.communicator is not None:
        ranks = _translated(comm, world.communicator)
        strangers = [place for place, rank in enumerate(ranks) if rank == mpi.UNDEFINED]
        if strangers:
            raise MeshError.because(
                f"Communicator.of(an MPI communicator of {comm.size} ranks)",
                f"the world has {world.size()} ranks, and ranks {strangers} of the communicator "
                "are not among them",
                None,
                "Communicator.of(MPI.COMM_WORLD) once at the start, on all ranks",
            )
        return ranks
    if world is None:
        raise UnisonoError("torch.distributed is not initialised")
    known = _world_ranks.setdefault(world, {})
    key = _translated(comm, mpi.COMM_WORLD)
    if key not in known:
        texts = _share(mpi, comm, str(dist.get_rank()), _default_deadline())
        known[key] = tuple(int(text) for text in texts)
    return known[key]


def _translated(comm: MPI.Intracomm, other: MPI.Intracomm) -> tuple[int, ...]:
    mine, theirs = comm.Get_group(), other.Get_group()
    try:
        return tuple(mine.Translate_ranks(None, theirs))
    finally:
        mine.Free()
        theirs.Free()


def _share(mpi: Any, comm: MPI.Intracomm, text: str, timeout_s: float) -> list[str]:
    """Return the texts of all ranks of `comm`."""
    data = text.encode()
    room = 1024
    if len(data) > room:
        raise UnisonoError(f"{text[:80]!r}... is too long to be shared ({len(data)} > {room})")
    everybody = bytearray(room * comm.size)
    with Threads(mpi).lock:
        request = comm.Iallgather([data.ljust(room), mpi.BYTE], [everybody, mpi.BYTE])
    _finish(mpi, request, timeout_s, "the start of a world")
    parts = [everybody[place * room : (place + 1) * room] for place in range(comm.size)]
    return [part.decode().rstrip() for part in parts]


def _finish(mpi: Any, request: Any, timeout_s: float, what: str) -> None:
    give_up, lock = time.monotonic() + timeout_s, Threads(mpi).lock
    nap_s = 20e-6
    while True:
        with lock:
            if request.Test():
                return
        if time.monotonic() > give_up:
            raise RankTimeout(
                f"{what} on rank {mpi.COMM_WORLD.rank} of MPI timed out after {timeout_s:g} s\n"
                "  not all ranks of the communicator have called it",
                op=what,
            )
        time.sleep(nap_s)
        nap_s = min(nap_s * 1.5, 200e-6)


def _default_deadline() -> float:
    given = environment_timeout_s()
    return DEFAULT_TIMEOUT_S if given is None else given
