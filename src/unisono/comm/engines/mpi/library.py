"""mpi4py itself: loaded when it is first needed, and what is done with communicators.

Importing `mpi4py.MPI` initialises MPI, so nothing here does it before a group is asked for. A
user's communicator carries nothing of ours but its own duplication, and every wait has a deadline.
"""

from __future__ import annotations

import importlib.util
import json
import secrets
import socket
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from unisono.comm.arguments import environment_timeout_s
from unisono.comm.groups import DEFAULT_TIMEOUT_S
from unisono.comm.machine import first_reachable, host_id, own_addresses
from unisono.environment import Environment
from unisono.errors import MeshError, MissingExtra, RankTimeout, UnisonoError

if TYPE_CHECKING:
    from mpi4py import MPI

_PURPOSE = "ranks that talk over MPI (backend 'mpi')"
lock = threading.RLock()
"""Held around calls of MPI where it may have been initialised for one thread at a time."""


def load() -> Any:
    """Return the module `mpi4py.MPI`, with MPI initialised.

    Raises:
        MissingExtra: mpi4py, or an MPI library for it, is not installed.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise MissingExtra.of("mpi", _PURPOSE, _first_line(error)) from error
    if MPI.Is_finalized():
        raise UnisonoError.because(_PURPOSE, "MPI has been finalized in this process")
    if not MPI.Is_initialized():
        raise UnisonoError.because(
            _PURPOSE, "MPI is not initialised in this process", None, "MPI.Init_thread() first"
        )
    return MPI


def unavailable() -> str | None:
    """Return why MPI cannot be used here, None if it can; does not initialise it."""
    install = 'pip install "unisono[mpi]"'
    try:
        spec = importlib.util.find_spec("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        return f"{_first_line(error)}: {install}"
    return None if spec is not None else f"mpi4py is not installed: {install}"


def is_communicator(source: object) -> bool:
    """Whether `source` is a communicator of mpi4py; does not import it."""
    module = sys.modules.get("mpi4py.MPI")
    return module is not None and isinstance(source, module.Comm)


def expect_threads(mpi: Any, doing: str) -> None:
    """Raise unless any thread may call MPI at any time: started calls run in one of the group."""
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        raise UnisonoError.because(
            f"{doing} over MPI",
            "MPI was initialised for one thread at a time",
            None,
            "mpi4py.rc.thread_level = 'multiple' before the first import of mpi4py.MPI; "
            "backend='gloo' needs no MPI",
        )


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


# -- stores whose address travels over MPI -------------------------------------------------------

_ADDRESSES = 8
"""How many addresses of a host other ranks get."""
_TEXT_BYTES = 1024
"""Longest text that ranks share."""


def store_for(environment: Environment, *, timeout_s: float) -> dist.Store | None:
    """Return a store for the world of `environment` whose address travels over MPI.

    Collective over that world. None where mpi4py is not installed, or where MPI does not know the
    same ranks.
    """
    if unavailable() is not None:
        return None
    world = load().COMM_WORLD
    if (world.rank, world.size) != (environment.rank, environment.size):
        return None
    return store_of(world, timeout_s=timeout_s)


def store_of(comm: MPI.Intracomm, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> dist.Store:
    """Return a store that rank 0 of `comm` hosts and all its ranks have joined.

    Collective over `comm`. The system gives rank 0 a free port, which it keeps; the address and a
    token by which the store is known travel over MPI.
    """
    from unisono.comm.lifecycle import open_store  # which imports the transports

    mpi = load()
    hosts = set(share(mpi, comm, host_id(), timeout_s))
    here = Environment(
        kind="unisono", rank=comm.rank, size=comm.size, nodes=len(hosts), local_size=comm.size
    )
    if comm.rank == 0:
        nonce = secrets.token_hex(16)
        store = open_store(here, timeout_s=timeout_s, nonce=nonce)
        addresses = ["127.0.0.1"] if len(hosts) == 1 else own_addresses() or [socket.gethostname()]
        port = store.port  # type: ignore[attr-defined]
        share(mpi, comm, json.dumps([addresses[:_ADDRESSES], port, nonce]), timeout_s)
        return store
    addresses, port, nonce = json.loads(share(mpi, comm, "", timeout_s)[0])
    addr = addresses[0] if len(addresses) == 1 else first_reachable(addresses, port)
    return open_store(here, addr=addr, port=port, timeout_s=timeout_s, nonce=nonce)


def positions_of(mpi: Any, comm: MPI.Intracomm) -> tuple[int, ...]:
    """Return the rank in MPI.COMM_WORLD of each rank of `comm`."""
    group, world = comm.Get_group(), mpi.COMM_WORLD.Get_group()
    try:
        places = tuple(group.Translate_ranks(None, world))
    finally:
        group.Free()
        world.Free()
    if mpi.UNDEFINED in places:
        raise MeshError.because(
            f"Communicator.of(an MPI communicator of {comm.size} ranks)",
            f"ranks {[place for place, rank in enumerate(places) if rank == mpi.UNDEFINED]} of it "
            "were not started together with this one (they have another MPI.COMM_WORLD)",
            None,
            "start all ranks with one mpiexec -n",
        )
    return places


def share(mpi: Any, comm: MPI.Intracomm, text: str, timeout_s: float) -> list[str]:
    """Return the texts of all ranks of `comm`."""
    data = text.encode()
    if len(data) > _TEXT_BYTES:
        raise UnisonoError(f"{text[:80]!r}... is too long to be shared ({len(data)} bytes)")
    texts = bytearray(_TEXT_BYTES * comm.size)
    request = comm.Iallgather([data.ljust(_TEXT_BYTES), mpi.BYTE], [texts, mpi.BYTE])
    _finish(mpi, request, timeout_s)
    starts = range(0, len(texts), _TEXT_BYTES)
    return [texts[begin : begin + _TEXT_BYTES].decode().rstrip() for begin in starts]


def duplicate(mpi: Any, comm: MPI.Intracomm, timeout_s: float) -> MPI.Intracomm:
    """Return a duplicate of `comm`. Collective over it."""
    twin, request = comm.Idup()
    _finish(mpi, request, timeout_s)
    return twin


def _finish(mpi: Any, request: Any, timeout_s: float) -> None:
    give_up, nap_s = time.monotonic() + timeout_s, 20e-6
    while not request.Test():
        if time.monotonic() > give_up:
            raise RankTimeout(
                f"making a group of an MPI communicator on rank {mpi.COMM_WORLD.rank} of MPI "
                f"timed out after {timeout_s:g} s\n"
                "  not all ranks of the communicator have called Communicator.of(comm)",
                op="new_group",
            )
        time.sleep(nap_s)
        nap_s = min(nap_s * 1.5, 200e-6)


def default_deadline() -> float:
    """Return the deadline where nothing else is said: that of the environment, or the usual one."""
    timeout_s = environment_timeout_s()
    return DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s


# -- communicators for messages of MPI's style ---------------------------------------------------

_wires: dict[tuple[int, ...], Any] = {}
"""Duplicates that carry such messages, by their ranks in MPI.COMM_WORLD; MPI frees them."""
_wired_world: weakref.ref[Any] | None = None
"""The world of torch.distributed whose ranks are those of MPI.COMM_WORLD."""


def wire_of(comm: Any) -> MPI.Intracomm:
    """Return a communicator with the ranks of `comm`, for messages alone.

    Collective over `comm` when its ranks are seen for the first time; local afterwards.
    """
    mpi = load()
    positions = positions_of(mpi, comm)
    if positions not in _wires:
        _wires[positions] = duplicate(mpi, comm, default_deadline())
    return _wires[positions]


def wire_world() -> None:
    """Give the world that has just begun, which has the ranks of MPI's, a wire. Collective."""
    global _wired_world
    wire_of(load().COMM_WORLD)
    _wired_world = weakref.ref(dist.group.WORLD)


def wire_of_world() -> MPI.Intracomm | None:
    """Return the wire of the current world, if it has one. Local."""
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None or _wired_world is None or _wired_world() is not world:
        return None
    return wire_of(load().COMM_WORLD)


def split(wire: MPI.Intracomm | None, color: int | None, key: int) -> Any:
    """Split a wire as the group of its ranks was split just before, if there is one. Collective."""
    if wire is None:
        return None
    mpi = load()
    part = wire.Split(mpi.UNDEFINED if color is None else color, key)
    return None if part == mpi.COMM_NULL else part
