"""Our own backends of torch.distributed.

`register()` makes them known; then `init_process_group("shm")`, `new_group(backend="mpi4py")`, DDP,
FSDP and DTensor use them like gloo.
"""

from __future__ import annotations

import torch.distributed as dist

from unisono.comm.communicator import register_source
from unisono.comm.engines import mpi
from unisono.comm.engines.shm import core
from unisono.comm.engines.shm.process_group import create as create_shm

__all__ = ["available", "mpi", "register"]


def register() -> None:
    """Make the backends known to torch.distributed. Idempotent, local."""
    if "SHM" not in dist.Backend._plugins:
        dist.Backend.register_backend("shm", create_shm, extended_api=True, devices=["cpu"])
    if "MPI4PY" not in dist.Backend._plugins:
        dist.Backend.register_backend("mpi4py", mpi.create, extended_api=True, devices=["cpu"])
        register_source(mpi.is_communicator, mpi.entry_of)


def available() -> dict[str, str]:
    """Return for each transport "ok", or why it is not to be had here."""
    no_shm, no_mpi = core.unavailable(), mpi.unavailable()
    return {
        "shm": "ok" if no_shm is None else f"{no_shm}; tensors go over gloo instead",
        "mpi": "ok" if no_mpi is None else no_mpi,
    }
