"""Which CUDA devices there are; the questions never raise on a machine without any."""

from __future__ import annotations

import torch
import torch.distributed as dist

from unisono.errors import PlatformError


def is_available() -> bool:
    """Whether a CUDA device can be used."""
    return torch.cuda.is_available()


def is_nccl_available() -> bool:
    """Whether ranks can talk by NCCL."""
    return torch.cuda.is_available() and dist.is_available() and dist.is_nccl_available()


def get_device_count() -> int:
    """Return the number of CUDA devices."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def get_current_device() -> int:
    """Return the current device, -1 for none."""
    return torch.cuda.current_device() if torch.cuda.is_available() else -1


def is_device_available(device_index: int) -> bool:
    """Whether there is a device of this number."""
    return 0 <= device_index < get_device_count()


def set_device(device_index: int) -> bool:
    """Make a device the current one; False if there is none of this number."""
    if not is_device_available(device_index):
        return False
    torch.cuda.set_device(device_index)
    return True


def get_device_properties(device_index: int) -> str:
    """Return name, capability and memory of a device as text."""
    _check(device_index)
    return str(torch.cuda.get_device_properties(device_index))


def get_device_memory(device_index: int) -> tuple[int, int]:
    """Return free and total bytes of a device."""
    _check(device_index)
    return torch.cuda.mem_get_info(device_index)


def _check(device_index: int) -> None:
    if not is_device_available(device_index):
        raise PlatformError.because(
            f"CUDA device {device_index}",
            f"{get_device_count()} CUDA devices",
            f"devices are 0 to {get_device_count() - 1}" if get_device_count() else None,
            "unisono.bayes.cuda.is_available() before asking",
        )
