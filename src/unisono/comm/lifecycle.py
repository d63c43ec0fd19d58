"""Start and end of a world: the store that ranks meet at, and the default process group.

No port is ever chosen and released: rank 0 binds port 0 and hands the listening socket itself to
the store. At the end no rank sees connections break, or waits for one that has left.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
import time
import warnings
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from unisono import torch_private
from unisono.comm import backends, groups, machine
from unisono.comm.communicator import Communicator, world
from unisono.comm.health import trace, watchdog
from unisono.comm.health.deadlock import announce_return
from unisono.comm.health.failures import post_failure, posted_failure
from unisono.comm.health.watchdog import Watchdog
from unisono.environment import RANK_PID, rank_mark
from unisono.errors import PlatformError

if TYPE_CHECKING:
    from unisono.environment import Environment

_IFNAME = "GLOO_SOCKET_IFNAME"
_NONCE_KEY = "unisono/nonce"
_QUIET_LEVELS = ("ERROR", "FATAL", "2", "3")
"""Levels of torch's log without warnings; ranks of ours have the first unless the user sets one."""
_changed_environment: dict[str, str | None] = {}
"""Variables that `start_world` set in this process, with what they were before."""


def open_store(
    environment: Environment,
    *,
    addr: str | None = None,
    port: int = 0,
    timeout_s: float,
    nonce: str | None = None,
) -> dist.Store:
    """Return the store of this world: rank 0 hosts it, the others join.

    Args:
        environment: the world. Under torchrun its own store is used and the rest is ignored.
        addr: where rank 0 listens (default: loopback on one node, the address of the job's network
            on several, `machine.of_job`), and where the others find it (default:
            `environment.master`).
        port: port of `addr`; 0 lets the system give rank 0 a free one (`store.port` tells which).
        timeout_s: deadline of joining, and of each wait in the store.
        nonce: a word of this run. Rank 0 leaves it in the store; a rank that finds another one
            there has reached a stranger's store and says so.
    """
    deadline = timedelta(seconds=timeout_s)
    if environment.kind == "torchrun":
        return _torchrun_store(environment, deadline)
    if addr is None and environment.master is not None:
        addr, port = environment.master
        _check_master(environment, addr, port)
    is_told_later = environment.rank == 0 and environment.kind == "unisono"
    if environment.size > 1 and port == 0 and not is_told_later:
        raise PlatformError.because(
            f"rank {environment.rank} of {environment.size} meets the others at a store of rank 0",
            f"no address of it (world of kind {environment.kind!r})",
            None,
            "set MASTER_ADDR and MASTER_PORT to the host of rank 0 and a free port there",
        )
    if environment.rank == 0:
        listen_at = addr or ("127.0.0.1" if environment.nodes == 1 else machine.of_job())
        with _names_unasked(listen_at):
            store = _host_store(listen_at, port, deadline)
        if nonce is not None:
            store.set(_NONCE_KEY, nonce)
        return store
    addr = addr or "127.0.0.1"
    with _names_unasked(addr):
        store = dist.TCPStore(addr, port, None, False, deadline, wait_for_workers=False)
    if nonce is not None and (other_nonce := store.get(_NONCE_KEY).decode()) != nonce:
        raise PlatformError.because(
            f"rank {environment.rank} joins the store of rank 0 at {addr}:{port}",
            f"the store of another run ({other_nonce} instead of {nonce})",
        )
    return store


def _names_unasked(addr: str) -> contextlib.AbstractContextManager[None]:
    """Connect to a numeric `addr` without a name server; not where torch would warn of that."""
    is_quiet = os.environ.get("TORCH_CPP_LOG_LEVEL", "") in _QUIET_LEVELS
    is_numeric = not addr or ":" in addr or addr.replace(".", "").isdigit()
    return machine.without_name_server() if is_quiet and is_numeric else contextlib.nullcontext()


def _torchrun_store(environment: Environment, deadline: timedelta) -> dist.Store:
    if environment.master is not None:
        _check_master(environment, *environment.master)
    handler = dist.rendezvous("env://", environment.rank, environment.size, timeout=deadline)
    store, _, _ = next(iter(handler))
    return store


def _check_master(environment: Environment, host: str, port: int) -> None:
    """Raise `PlatformError` if ranks of several hosts cannot meet at `host`."""
    request = f"MASTER_ADDR={host} MASTER_PORT={port} for {environment.size} ranks"
    hint = "MASTER_ADDR=10.0.0.1, a numeric address of the host of rank 0, the same on all hosts"
    try:
        addresses = machine.resolve(host)
    except OSError as error:
        problem = f"{host} does not resolve on {socket.gethostname()}: {error.strerror}"
        raise PlatformError.because(request, problem, None, hint) from None
    # Who sets the variables by hand may leave LOCAL_WORLD_SIZE out: then nodes is only a guess.
    is_counted = environment.nodes > 1 and "LOCAL_WORLD_SIZE" in os.environ
    if is_counted and all(map(machine.is_loopback, addresses)):
        raise PlatformError.because(
            request,
            f"{host} is {addresses[0]}: another machine on each of {environment.nodes} hosts",
            f"{environment.size} ranks / {environment.local_size} each = {environment.nodes} hosts",
            hint,
        )


def _host_store(addr: str, port: int, deadline: timedelta) -> dist.TCPStore:
    """Listen at `addr:port` and serve a store on that very socket."""
    family = socket.AF_INET6 if ":" in addr else socket.AF_INET
    try:
        listener = socket.create_server((addr, port), family=family, backlog=1024)
    except OSError as error:
        raise PlatformError.because(
            f"rank 0 listens at {addr or '*'}:{port}",
            f"{error.strerror} (error {error.errno})",
            None,
            "leave the port out, and the system gives a free one",
        ) from error
    bound_port = listener.getsockname()[1]
    return dist.TCPStore(
        addr or "127.0.0.1",  # our own way to it; a host may not know its own name
        bound_port,
        None,
        True,
        deadline,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def start_world(
    environment: Environment,
    *,
    backend: str | None = None,
    device: torch.device | str | None = None,
    timeout_s: float = 600.0,
    store: dist.Store | None = None,
    name: str = "world",
) -> Communicator:
    """Initialise the default process group of this world and return it as a communicator.

    Collective over all ranks of `environment`. In a bare process, or where a default group already
    exists, nothing is started: what is there is the world.

    Args:
        environment: the world, as `detect` tells it.
        backend: `"gloo"`, `"shm"`, `"mpi"`, that of an accelerator, `"cpu:gloo,cuda:nccl"`, or None
            for a choice (`choose_backend`).
        device: where this rank's tensors live; None is the CPU.
        timeout_s: deadline of each collective, and of the start itself.
        store: an open store; None opens it with `open_store`.
        name: prefix of the keys of this world, so that one store can serve several in turn.
    """
    place = torch.device("cpu" if device is None else device)
    if place.type != "cpu" and place.index is not None and torch.accelerator.device_count() > 1:
        torch.accelerator.set_device_index(place)
    if not dist.is_initialized() and environment.is_world:
        through_mpi = None if store is not None else _store_through_mpi(environment, timeout_s)
        store = store or through_mpi or open_store(environment, timeout_s=timeout_s)
        choose_interface(environment, store)
        backend = backends.choose_backend(
            backend,
            device=place.type,
            nodes=environment.nodes,
            available=backends.available(),
            is_mpi_job=through_mpi is not None,
        )
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(f"unisono/{name}", store),
            rank=environment.rank,
            world_size=environment.size,
            timeout=timedelta(seconds=timeout_s),
        )
        if through_mpi is not None:
            backends.mpi.wire_world()
        untested = torch_private.untested()
        if untested is not None and environment.rank == 0:
            warnings.warn(untested, stacklevel=2)  # Python shows it once in a process
        # What this rank starts has the same variables, and would wait for a world of its own.
        _set_for_this_world(RANK_PID, rank_mark(os.environ, os.getpid()), always=True)
    comm = world()
    if comm.device != place:
        comm = comm.with_device(place)
    comm._engine.connect(timeout_s)
    return comm


def choose_interface(environment: Environment, store: dist.Store) -> None:
    """Have gloo use the interface between the ranks, unless the user chose one. Local.

    `stop_world` puts the variable back.
    """
    if (interface := _interface(environment, store)) is not None:
        _set_for_this_world(_IFNAME, interface)


def _interface(environment: Environment, store: dist.Store) -> str | None:
    """Return the interface for gloo, which would take the one of the own host name."""
    if environment.nodes == 1:
        return "lo" if sys.platform == "linux" else "lo0"
    master = environment.master[0] if environment.master else getattr(store, "host", "")
    for host in (master, *machine.own_addresses()):
        interface = machine.interface_towards(host) if host else None
        if interface is not None and not interface.startswith("lo"):
            return interface
    return None


def _store_through_mpi(environment: Environment, timeout_s: float) -> dist.Store | None:
    """Let MPI tell the ranks of an MPI job where the store is, if nothing else does."""
    if environment.master is not None or environment.kind not in ("mpich", "openmpi"):
        return None
    if backends.available().get("mpi") != "ok":
        return None
    from unisono.comm.engines import mpi

    return mpi.store_for(environment, timeout_s=timeout_s)


def stop_world() -> None:
    """End the world of this process and put its environment variables back. Safe to repeat.

    Collective over the world, where there is one.
    """
    close_world()
    while _changed_environment:
        name, before = _changed_environment.popitem()
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


def _set_for_this_world(name: str, value: str, *, always: bool = False) -> None:
    """Set a variable until `stop_world`; one that is set already only if `always`."""
    if always or name not in os.environ:
        _changed_environment.setdefault(name, os.environ.get(name))
        os.environ[name] = value


LEAVE_S = 5.0
"""Longest time to wait for the other ranks of a world that is well."""
BROKEN_S = 1.0
"""Longest time that the keeper of the store stays in a broken one, so that others learn why."""
_LONGEST_NAP_S = 0.05
_PEERS_S = 0.1


def close_world(*, timeout_s: float = LEAVE_S) -> None:
    """End the world of this process: all ranks come together, rank 0 leaves last.

    Collective over the world. Rank 0 keeps the store, so it waits until the others have let go (at
    most `timeout_s`). After a failure, or where a process of the world has ended, ranks leave
    without waiting. Saves the trace that `UNISONO_TRACE` asked for; rank 0 warns if it cannot be
    written. Without an initialised torch.distributed only that is done.
    """
    if not dist.is_initialized():
        trace.warn(trace.save_whole_run())
        return
    rank, size = dist.get_rank(), dist.get_world_size()
    is_well, untraced, dog = size == 1, "", watchdog.current()
    with contextlib.suppress(RuntimeError):  # a rank or the store is gone: just leave
        if size > 1:
            say_returned()
            is_well = _meet_all(timeout_s, dog)
        if is_well:
            untraced = trace.save_whole_run()
    if size > 1:
        watchdog.stop()
        _say_goodbye(timeout_s if is_well else min(timeout_s, BROKEN_S), dog)
    dist.destroy_process_group()
    groups.forget_ended()
    if rank == 0:
        trace.warn(untraced)


def say_returned() -> None:
    """Tell the other ranks that this one's function has returned. Local, safe to repeat.

    Called by the launcher. Ranks that wait for this one in a collective, now or
    later, then raise `CollectiveMismatch` at once.
    """
    announce_return(groups.accounts())


def abandon_world(error: BaseException) -> None:
    """Leave a world because of `error`: tell the other ranks, and wait for none of them.

    Only the keeper of the store stays for a moment, so that the others can learn of it. Not
    collective. The process group stays as it is: the process is about to end.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        with contextlib.suppress(RuntimeError):
            post_failure(error)
        _say_goodbye(BROKEN_S, watchdog.current())


def leave_at_exit() -> None:
    """Have this process close its world when it ends, for worlds that no launcher closes.

    A rank that ends with an exception says so and does not wait.
    """
    atexit.register(_leave)


def _leave() -> None:
    error = getattr(sys, "last_value", None)
    if error is None:
        stop_world()
    else:
        abandon_world(error)


def _store() -> dist.Store:
    return dist.PrefixStore("unisono/close", watchdog.default_store())


def _meet_all(timeout_s: float, dog: Watchdog | None) -> bool:
    """Wait for all ranks of the world; return whether they have come.

    Rank 0 looks for them and tells the others, so that the store is asked in proportion to the
    number of ranks, and not to its square.
    """
    rank, size, store = dist.get_rank(), dist.get_world_size(), _store()
    if rank != 0:
        store.set(f"here/{rank}", "")
        return _await(store, {"met": 0}, timeout_s, dog) and store.get("met") == b"all"
    is_well = _await(store, {f"here/{r}": r for r in range(1, size)}, timeout_s, dog)
    store.set("met", "all" if is_well else "not all")
    return is_well


def _say_goodbye(timeout_s: float, dog: Watchdog | None) -> None:
    """Tell that this rank has let go; rank 0 waits until all have."""
    rank, size, store = dist.get_rank(), dist.get_world_size(), _store()
    with contextlib.suppress(RuntimeError):
        if rank != 0:
            store.set(f"gone/{rank}", "")
        else:
            keys = {f"gone/{r}": r for r in range(1, size)}
            _await(store, keys, timeout_s, dog, even_broken=True)


def _await(
    store: dist.Store,
    keys: Mapping[str, int],
    timeout_s: float,
    dog: Watchdog | None,
    *,
    even_broken: bool = False,
) -> bool:
    """Wait until ranks have left their keys; return whether all have.

    Ranks whose process has ended are not waited for; in a broken world no rank is, unless
    `even_broken`.
    """
    began = time.monotonic()
    look = began + _PEERS_S / 2
    missing, has_dead = dict(keys), False
    while missing and not store.check(list(missing)):
        now = time.monotonic()
        if now > began + timeout_s or (not even_broken and (has_dead or _is_broken())):
            return False
        if now > look:
            look = now + _PEERS_S
            missing = {key: rank for key, rank in missing.items() if not store.check([key])}
            if dog is not None:
                dead = {key for key, rank in missing.items() if dog.condition(rank) == "dead"}
                missing = {key: rank for key, rank in missing.items() if key not in dead}
                has_dead = has_dead or bool(dead)
        # Long waits are looked at less often: many ranks may be waiting.
        time.sleep(min(_LONGEST_NAP_S, 1e-3 + (now - began) / 10))
    return not has_dead


def _is_broken() -> bool:
    dog = watchdog.current()
    has_failed = dog is not None and dog.has_failed
    return has_failed or groups.is_broken() or posted_failure() is not None
