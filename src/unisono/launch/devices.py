"""The kinds of places where ranks run, and which accelerators this process sees.

Accelerators are counted without making a context on any of them.
"""

from __future__ import annotations

import difflib
import os
import platform
import sys
from contextlib import suppress
from enum import Enum
from pathlib import Path

from unisono.errors import PlatformError

__all__ = ["Device"]

_ALIASES = {"cuda": "gpu"}
_DRIVER_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""One of them is there wherever torch could see a GPU on Linux."""


class Device(Enum):
    """A kind of place, as `Platform(device=...)` and `run(on=...)` name it."""

    CPU = "cpu"
    GPU = "gpu"
    SLURM = "slurm"
    MPS = "mps"
    MPI = "mpi"
    SSH = "ssh"
    RAY = "ray"

    @property
    def is_here(self) -> bool:
        """Whether its ranks are processes of this host, which the launcher starts itself."""
        return self in (Device.CPU, Device.GPU, Device.MPS)

    @classmethod
    def from_str(cls, device: str | Device) -> Device:
        """Return the device of that name; case does not matter, and `"cuda"` is the GPU.

        Example:
            >>> Device.from_str("CUDA")
            <Device.GPU: 'gpu'>
        """
        if isinstance(device, Device):
            return device
        word = device.strip().lower() if isinstance(device, str) else str(device)
        word = _ALIASES.get(word, word)
        with suppress(ValueError):
            return cls(word)
        values = [member.value for member in cls]
        near = difflib.get_close_matches(word, [*values, *_ALIASES], n=1)
        raise PlatformError.because(
            f"device={device!r}",
            f"devices are {', '.join(map(repr, values))}",
            None,
            f"did you mean device={near[0]!r}?" if near else 'device="cpu"',
        )


def visible_gpus() -> int:
    """Return the number of CUDA devices that ranks of this process could use.

    Without a driver the answer is 0 and torch is not imported for it.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return 0
    if "torch" not in sys.modules and sys.platform == "linux":
        if not any(Path(file).exists() for file in _DRIVER_FILES):
            return 0
    import torch

    return torch.cuda.device_count()


def has_mps() -> bool:
    """Whether this machine has an Apple GPU that torch can use."""
    if sys.platform != "darwin" or platform.machine() != "arm64":
        return False
    import torch

    return torch.backends.mps.is_available()


def gpu_index(local_rank: int, local_size: int, visible: int, *, oversubscribe: bool) -> int | None:
    """Return which visible GPU a rank gets; None if there are too few.

    A rank that sees exactly one device was bound to it by a scheduler and takes it.
    """
    if visible >= local_size:
        return local_rank
    if visible == 1:
        return 0
    return local_rank % visible if oversubscribe and visible else None
