"""Our own backends of torch.distributed.

`register()` makes them known; then `init_process_group("shm")`, `new_group(backend="shm")`, DDP,
FSDP and DTensor use them like gloo.
"""

from __future__ import annotations

import torch.distributed as dist

from unisono.comm.transports.shm import rendezvous
from unisono.comm.transports.shm.process_group import create as create_shm

__all__ = ["available", "register"]


def register() -> None:
    """Make the backends known to torch.distributed. Idempotent, local."""
    if "SHM" not in dist.Backend._plugins:
        dist.Backend.register_backend("shm", create_shm, extended_api=True, devices=["cpu"])


def available() -> dict[str, str]:
    """Return for each transport "ok", or why it is not to be had here."""
    why = rendezvous.unavailable()
    return {"shm": "ok" if why is None else f"{why}; tensors go over gloo instead"}
