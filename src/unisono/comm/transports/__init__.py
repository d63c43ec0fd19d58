"""Our own backends of torch.distributed.

`register()` makes them known; then `init_process_group("shm")`, `new_group(backend="mpi4py")`, DDP,
FSDP and DTensor use them like gloo.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.distributed as dist

from unisono.comm.communicator import register_source
from unisono.comm.transports import mpi
from unisono.comm.transports.shm import core
from unisono.comm.transports.shm.process_group import ShmProcessGroup

__all__ = ["available", "mpi", "register"]


def register() -> None:
    """Make the backends known to torch.distributed. Idempotent, local."""
    for name, kind in (("shm", ShmProcessGroup), ("mpi4py", mpi.MpiProcessGroup)):
        if name.upper() not in dist.Backend._plugins:
            dist.Backend.register_backend(
                name, partial(_create, kind), extended_api=True, devices=["cpu"]
            )
            if kind is mpi.MpiProcessGroup:
                register_source(mpi.is_communicator, mpi.entry_of)


def _create(
    kind: type[ShmProcessGroup | mpi.MpiProcessGroup], options: Any, _: Any
) -> dist.ProcessGroup:
    """Make a group for torch.distributed from its backend options."""
    return kind(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        options.global_ranks_in_group,
        str(options.group_id),
    )


def available() -> dict[str, str]:
    """Return for each transport "ok", or why it is not to be had here."""
    no_shm, no_mpi = core.unavailable(), mpi.unavailable()
    return {
        "shm": "ok" if no_shm is None else f"{no_shm}; tensors go over gloo instead",
        "mpi": "ok" if no_mpi is None else no_mpi,
    }
