"""From a process to a rank in its world: device, process group, groups of the user, seed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from unisono.launch.here import Here, set_here

if TYPE_CHECKING:
    import torch.distributed as dist

    from unisono.comm.environment import Environment
    from unisono.launch.platform import Platform


def enter_world(
    environment: Environment,
    platform: Platform,
    *,
    store: dist.Store | None,
    name: str,
    report_fd: int | None = None,
) -> Here:
    """Join the world and return what this rank is. Collective over all ranks of `environment`.

    The order is the same on every rank: device, group of all, the user's groups, seed.

    Args:
        environment: the place of this process.
        platform: what was asked for, with `seed_per_rank` decided.
        store: where the ranks meet.
        name: prefix of the keys of this world.
        report_fd: pipe to the launcher.
    """
    import torch

    device = platform.torch_device(environment.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    group: dist.ProcessGroup | None = None
    if platform.ipc_groups is None:
        os.environ["UNISONO_DETECT"] = "0"  # each rank is a world of its own
    else:
        from unisono.comm.start import start_world

        start_world(
            environment,
            backend=platform.backend,
            device=device,
            timeout_s=platform.comm_timeout_s,
            store=store,
            name=name,
        )
        group = _own_group(platform.ipc_groups)
    if platform.seed is not None:
        from unisono.launch.functional import seed_generators

        seed_generators(platform.seed + (environment.rank if platform.seed_per_rank else 0))
    here = Here(
        rank=environment.rank,
        local_rank=environment.local_rank,
        platform=platform,
        device=device,
        group=group,
        report_fd=report_fd,
    )
    set_here(here)
    return here


def _own_group(groups: list[list[int]]) -> dist.ProcessGroup | None:
    """Make the user's groups, in list order, and return the one of this rank."""
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
