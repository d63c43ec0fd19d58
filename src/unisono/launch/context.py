"""A process as a rank: what it knows of itself, how it enters its world, a rank in this process.

The process that calls `run_in_process` or `setup` is put back as it was afterwards.
"""

from __future__ import annotations

import itertools
import os
import random
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from unisono.environment import RANK_PID, Environment, detect, rank_mark
from unisono.errors import PlatformError

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from unisono.launch.conventions import Convention
    from unisono.launch.platform import Platform
    from unisono.launch.request import Request
    from unisono.launch.results import Results

__all__ = ["setup"]


@dataclass(frozen=True, kw_only=True)
class Here:
    """A rank, seen from inside."""

    rank: int
    """Its place in the world."""
    local_rank: int
    """Its place on its node."""
    platform: Platform
    """What was asked for, with the address at which the ranks met."""
    device: torch.device
    """Where its tensors live."""
    group: dist.ProcessGroup | None
    """Its process group; None where the platform wants none."""
    report_fd: int | None = None
    """The pipe to the launcher, if it has one."""


_here: Here | None = None


def here() -> Here | None:
    """Return what this process knows of itself; None if it is not a rank of a launcher of ours."""
    return _here


def set_here(value: Here | None) -> None:
    """Remember what this process is."""
    global _here
    _here = value


def enter_world(
    environment: Environment,
    platform: Platform,
    *,
    store: dist.Store | None,
    name: str,
    report_fd: int | None = None,
    at_first_use: bool = False,
) -> Here:
    """Join the world and return what this rank is. Collective over all ranks of `environment`.

    The order is the same on every rank: device, group of all, the user's groups, seed.

    Args:
        environment: the place of this process.
        platform: what was asked for, with `seed_per_rank` decided.
        store: where the ranks meet.
        name: prefix of the keys of this world.
        report_fd: pipe to the launcher.
        at_first_use: whether to leave the two groups to whoever first asks for the world, or to the
            script's own `init_process_group`; then this is not collective.
    """
    import torch

    device = platform.torch_device(environment.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    here = Here(
        rank=environment.rank,
        local_rank=environment.local_rank,
        platform=platform,
        device=device,
        group=None,
        report_fd=report_fd,
    )
    set_here(here)
    if platform.ipc_groups is None:
        os.environ["UNISONO_DETECT"] = "0"  # each rank is a world of its own
    elif at_first_use and store is not None:
        _wait_for_first_use(here, environment, store, name)
    else:
        here = _join(here, environment, store, name)
    if platform.seed is not None:
        from unisono.launch.functional import seed_generators

        seed_generators(platform.seed + (environment.rank if platform.seed_per_rank else 0))
    return here


def _wait_for_first_use(here: Here, environment: Environment, store: dist.Store, name: str) -> None:
    from unisono.comm.groups import join_at_first_use
    from unisono.comm.lifecycle import choose_interface

    rounds = itertools.count()  # a script may end its world, and use another one afterwards

    def join() -> None:
        _join(here, environment, store, f"{name}/{next(rounds)}")

    choose_interface(environment, store)
    join_at_first_use(join, store)


def _join(here: Here, environment: Environment, store: dist.Store | None, name: str) -> Here:
    """Start torch.distributed and make the groups of the user."""
    from unisono.comm.lifecycle import start_world

    start_world(
        environment,
        backend=here.platform.backend,
        device=here.device,
        timeout_s=here.platform.comm_timeout_s,
        store=store,
        name=name,
    )
    here = replace(here, group=own_group(here.platform.ipc_groups or []))
    set_here(here)
    return here


def own_group(groups: list[list[int]]) -> dist.ProcessGroup | None:
    """Make the user's groups, in list order; return the one of this rank. Collective."""
    import torch.distributed as dist

    from unisono.comm import world

    if not groups:
        return dist.group.WORLD
    comm = world()
    own: dist.ProcessGroup | None = None
    for ranks in groups:
        member = comm.sub(ranks)
        if member is not None:
            own = member.process_group()
    return own


def run_in_process(request: Request, convention: Convention) -> Results[Any]:
    """Run a request for one rank in this process; exceptions pass as they are."""
    from unisono.launch.results import Results

    begin = time.perf_counter()
    with _as_rank(request.platform, rank=0, local_rank=0, node=0) as place:
        ready = time.perf_counter()
        value = convention.call(request.fn, request.args, request.kwargs, place)
        wall_s = time.perf_counter() - ready
    return Results(
        [value],
        hosts=[socket.gethostname()],
        platform=request.place,
        wall_s=wall_s,
        start_s=ready - begin,
        threads=request.platform.cpus_per_rank,
    )


def setup(
    node: int,
    global_rank: int,
    local_rank: int,
    platform: Platform,
    target: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Be the given rank of `platform` in this process and run `target`; return what it returns.

    Collective over all ranks of the platform: for more than one, `master_addr` and `master_port`
    say where they meet.
    """
    from unisono.launch.conventions import choose_convention

    if platform.requires_ipc and (platform.master_addr is None or platform.master_port is None):
        raise PlatformError.because(
            f"setup(..., global_rank={global_rank}) of {platform.world_size} ranks",
            "no address at which the ranks meet",
            None,
            "Platform(master_addr='127.0.0.1', master_port=29400)",
        )
    convention = choose_convention(target, args, kwargs)
    if platform.seed_per_rank is None:
        platform = platform.but(seed_per_rank=False)
    with _as_rank(platform, rank=global_rank, local_rank=local_rank, node=node) as place:
        return convention.call(target, args, kwargs, place)


@contextmanager
def _as_rank(platform: Platform, *, rank: int, local_rank: int, node: int) -> Iterator[Here]:
    """Make this process a rank for the length of the block."""
    from unisono.comm.lifecycle import open_store, stop_world

    before, known = dict(os.environ), here()
    states = _random_states()
    run_id = secrets.token_hex(8)
    for name in (RANK_PID, "MASTER_ADDR", "MASTER_PORT", "UNISONO_DETECT"):
        os.environ.pop(name, None)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(platform.world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(platform.ranks_per_node),
        "NODE_RANK": str(node),
        "UNISONO_RUN_ID": run_id,
        "UNISONO_RESTART": "0",
        **(platform.env or {}),
    }
    try:
        environment = detect()
        store = None
        if platform.ipc_groups is not None:
            store = open_store(
                environment,
                addr=platform.master_addr,
                port=platform.master_port or 0,
                timeout_s=platform.start_timeout_s,
            )
            addr = platform.master_addr or "127.0.0.1"
            port = platform.master_port or store.port  # pyright: ignore[reportAttributeAccessIssue]
            platform = platform.but(master_addr=addr, master_port=port)
            os.environ |= {"MASTER_ADDR": addr, "MASTER_PORT": str(port)}
        os.environ[RANK_PID] = rank_mark(os.environ, os.getpid())
        yield enter_world(environment, platform, store=store, name="in-process")
    finally:
        stop_world()
        set_here(known)
        os.environ.clear()
        os.environ.update(before)
        _set_random_states(states)


@contextmanager
def seeded(seed: int | None, rank: int) -> Iterator[None]:
    """Seed this rank's generators inside the block, and put them back behind it; None: nothing."""
    if seed is None:
        yield
        return
    from unisono.launch.functional import seed_generators

    states = _random_states()
    seed_generators(seed + rank)
    try:
        yield
    finally:
        _set_random_states(states)


def _random_states() -> tuple[Any, Any, Any]:
    import torch

    numpy = sys.modules.get("numpy")
    state = numpy.random.get_state() if numpy is not None else None
    return random.getstate(), state, torch.get_rng_state()


def _set_random_states(states: tuple[Any, Any, Any]) -> None:
    import torch

    random.setstate(states[0])
    if states[1] is not None:
        sys.modules["numpy"].random.set_state(states[1])
    torch.set_rng_state(states[2])
