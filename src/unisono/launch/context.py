"""The rank that this process is: its place, how it joins its world, its random numbers."""

from __future__ import annotations

import itertools
import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from unisono import accelerator
from unisono.environment import Environment

if TYPE_CHECKING:
    import queue

    import torch
    import torch.distributed as dist
    from torch import nn

    from unisono.launch.platform import Platform


@dataclass(frozen=True, kw_only=True)
class Here:
    """The rank that this process is."""

    rank: int
    """Its place in the world."""
    local_rank: int
    """Its place on its node."""
    platform: Platform
    """The platform, with the address at which the ranks met."""
    device: torch.device
    """Where its tensors live."""
    group: dist.ProcessGroup | None
    """Its process group; None if the platform has none."""
    report_fd: int | None = None
    """The pipe to the launcher, if it has one."""
    shared_fds: tuple[int, ...] = ()
    """Files in memory that the ranks of this host share; those of an elastic job have some."""
    orders: queue.SimpleQueue[dict[str, Any]] | None = None
    """Where orders for a member of an elastic job arrive."""


_here: Here | None = None


def here() -> Here | None:
    """Return the rank that this process is; None if no launcher of ours started it."""
    return _here


def set_here(value: Here | None) -> None:
    """Set the rank that this process is."""
    global _here
    _here = value


def rank_device() -> torch.device:
    """Return the device of this rank; the CPU in a process that is not a rank."""
    import torch

    return torch.device("cpu") if _here is None else _here.device


def device_of(module: nn.Module) -> torch.device:
    """Return where a module is: its first parameter, else its first buffer, else this rank."""
    tensors = itertools.chain(module.parameters(), module.buffers())
    return next((tensor.device for tensor in tensors), rank_device())


def enter_world(
    environment: Environment,
    platform: Platform,
    *,
    store: dist.Store | None,
    name: str,
    report_fd: int | None = None,
    shared_fds: tuple[int, ...] = (),
    orders: queue.SimpleQueue[dict[str, Any]] | None = None,
    at_first_use: bool = False,
) -> Here:
    """Join the world and return what this rank is. Collective over all ranks of `environment`.

    The order is the same on every rank: device, group of all, the user's groups, seed.

    Args:
        environment: the place of this process.
        platform: the platform, with `seed_per_rank` decided.
        store: where the ranks meet.
        name: prefix of the keys of this world.
        report_fd: pipe to the launcher.
        shared_fds: files in memory that the ranks of this host share.
        orders: where orders for a member of an elastic job arrive.
        at_first_use: whether to leave the two groups to the first use of the world, or to the
            script's own `init_process_group`; then this is not collective.
    """
    device = platform.torch_device(environment.local_rank)
    accelerator.set_device(device)
    here = Here(
        rank=environment.rank,
        local_rank=environment.local_rank,
        platform=platform,
        device=device,
        group=None,
        report_fd=report_fd,
        shared_fds=shared_fds,
        orders=orders,
    )
    set_here(here)
    if platform.ipc_groups is None:
        os.environ["UNISONO_DETECT"] = "0"  # each rank is a world of its own
    elif at_first_use and store is not None:
        from unisono.comm.groups import join_at_first_use
        from unisono.comm.lifecycle import choose_interface

        rounds = itertools.count()  # a script may end its world, and use another one afterwards
        choose_interface(environment, store)
        join_at_first_use(lambda: _join(here, environment, store, f"{name}/{next(rounds)}"), store)
    else:
        _join(here, environment, store, name)
    if platform.seed is not None:
        seed_generators(platform.seed + (environment.rank if platform.seed_per_rank else 0))
    return _here or here


def _join(here: Here, environment: Environment, store: dist.Store | None, name: str) -> None:
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
    set_here(replace(here, group=own_group(here.platform.ipc_groups or [])))


def own_group(groups: list[list[int]]) -> dist.ProcessGroup | None:
    """Make the user's groups, in list order; return the one of this rank. Collective."""
    import torch.distributed as dist

    from unisono.comm import world

    if not groups:
        return dist.group.WORLD
    comm = world()
    group_of_rank: dist.ProcessGroup | None = None
    for ranks in groups:
        member = comm.sub(ranks)
        if member is not None:
            group_of_rank = member.process_group()
    return group_of_rank


@contextmanager
def checked(mode: bool | None) -> Iterator[None]:
    """Turn check mode on or off inside; None leaves it as it is."""
    if mode is None:
        yield
        return
    from unisono.comm.health.check import check

    with check(mode):
        yield


@contextmanager
def seeded(seed: int | None, rank: int) -> Iterator[None]:
    """Seed the generators of this rank, and restore them on exit; None does nothing."""
    if seed is None:
        yield
        return
    with generators_kept():
        seed_generators(seed + rank)
        yield


def seed_generators(seed: int) -> None:
    """Seed the generators of Python, numpy, torch and all its devices in this process."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the generators of Python, numpy and torch, on all devices, on exit."""
    numpy = sys.modules.get("numpy")
    states = random.getstate(), numpy and numpy.random.get_state()
    try:
        with accelerator.forked_generators():
            yield
    finally:
        random.setstate(states[0])
        if numpy is not None:
            numpy.random.set_state(states[1])
