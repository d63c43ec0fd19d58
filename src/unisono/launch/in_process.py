"""A rank in the calling process, which is put back as it was afterwards."""

from __future__ import annotations

import os
import random
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from unisono.environment import RANK_PID, rank_mark
from unisono.errors import PlatformError
from unisono.launch.conventions import Convention, choose_convention
from unisono.launch.here import Here, here, set_here
from unisono.launch.platform import Platform
from unisono.launch.request import Request
from unisono.launch.results import Results

__all__ = ["setup"]


def run_in_process(request: Request, convention: Convention) -> Results[Any]:
    """Run a request for one rank in this process; exceptions pass as they are."""
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
    platform = platform.but()
    platform.check()  # not the port: it is rank 0's, which may have it already
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
    from unisono.environment import detect
    from unisono.launch.entering import enter_world

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
