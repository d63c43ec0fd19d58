"""Which accelerators this process sees, found without making a context on any of them."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

_DRIVER_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""One of them is there wherever torch could see a GPU on Linux."""


def visible_gpus() -> int:
    """Return the number of CUDA devices that ranks of this process could use.

    Without a driver the answer is 0 and torch is not imported for it.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return 0
    is_linux = sys.platform == "linux"
    if "torch" not in sys.modules and is_linux and not any(map(_exists, _DRIVER_FILES)):
        return 0
    import torch

    return torch.cuda.device_count()


def has_mps() -> bool:
    """Whether this machine has an Apple GPU that torch can use."""
    if sys.platform != "darwin" or platform.machine() != "arm64":
        return False
    import torch

    return torch.backends.mps.is_available()


def is_cuda_initialized() -> bool:
    """Whether this process has a CUDA context, so that what it forks could not use CUDA."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


def gpu_index(local_rank: int, local_size: int, visible: int, *, oversubscribe: bool) -> int | None:
    """Return which visible GPU a rank gets; None if there are too few.

    A rank that sees exactly one device was bound to it by a scheduler and takes it.
    """
    if visible >= local_size:
        return local_rank
    if visible == 1:
        return 0
    return local_rank % visible if oversubscribe and visible else None


def _exists(path: str) -> bool:
    return Path(path).exists()
