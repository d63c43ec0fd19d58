"""What `import torch` loads of us: the names of our backends, and nothing behind them.

An entry point of the group `torch.backends`, so that `init_process_group("shm")` works in programs
that never import unisono. It runs at every `import torch` of the environment, so it is small and
does not raise. `TORCH_DEVICE_BACKEND_AUTOLOAD=0` switches it off.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any


def register() -> None:
    """Tell torch.distributed the names of our backends. Local, idempotent."""
    with suppress(Exception):  # a torch without distributed, or one that has changed
        import torch.distributed as dist

        for name in ("shm", "mpi4py"):
            if name not in dist.Backend.backend_list:
                dist.Backend.register_backend(
                    name, partial(_create, name), extended_api=True, devices=["cpu"]
                )


def _create(name: str, options: Any, own_options: Any) -> Any:
    """Make a group for torch.distributed; only the first one loads the library."""
    from unisono.comm import backends

    return backends.create(name, options, own_options)
