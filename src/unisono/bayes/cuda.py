"""Which CUDA devices there are; the questions never raise on a machine without any.

Programs that insist on CUDA run without it after `take_cpu()`: the CPU of every rank is taken for a
device then, and `"nccl"` for the best backend that is there.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from unisono.comm import detect
from unisono.errors import PlatformError

NAME, BACKEND = "cuda", "nccl"
"""The words by which programs written for pytagi ask for a device and a backend."""
_on_cpu = False


def take_cpu(switch: bool = True) -> bool:
    """Take the CPU for CUDA from now on, on a machine without CUDA; returns whether it was."""
    global _on_cpu
    before, _on_cpu = _on_cpu, switch and not torch.cuda.is_available()
    return before


def is_on_cpu() -> bool:
    """Whether the CPU stands for CUDA."""
    return _on_cpu


def is_available() -> bool:
    """Whether a CUDA device can be used."""
    return _on_cpu or torch.cuda.is_available()


def is_nccl_available() -> bool:
    """Whether ranks can talk by NCCL."""
    return _on_cpu or (
        torch.cuda.is_available() and dist.is_available() and dist.is_nccl_available()
    )


def get_device_count() -> int:
    """Return the number of CUDA devices; that of the ranks of this node where the CPU is one."""
    if _on_cpu:
        return max(detect().local_size, 1)
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def get_current_device() -> int:
    """Return the current device, -1 for none."""
    if _on_cpu:
        return max(detect().local_rank, 0)
    return torch.cuda.current_device() if torch.cuda.is_available() else -1


def is_device_available(device_index: int) -> bool:
    """Whether there is a device of this number."""
    return 0 <= device_index < get_device_count()


def set_device(device_index: int) -> bool:
    """Make a device the current one; False if there is none of this number."""
    if not is_device_available(device_index):
        return False
    if not _on_cpu:
        torch.cuda.set_device(device_index)
    return True


def get_device_properties(device_index: int) -> str:
    """Return name, capability and memory of a device as text."""
    _check(device_index)
    return "the CPU" if _on_cpu else str(torch.cuda.get_device_properties(device_index))


def get_device_memory(device_index: int) -> tuple[int, int]:
    """Return free and total bytes of a device."""
    _check(device_index)
    if _on_cpu:
        free, total = (os.sysconf(f"SC_{name}_PAGES") for name in ("AVPHYS", "PHYS"))
        return free * os.sysconf("SC_PAGE_SIZE"), total * os.sysconf("SC_PAGE_SIZE")
    return torch.cuda.mem_get_info(device_index)


def _check(device_index: int) -> None:
    if not is_device_available(device_index):
        raise PlatformError.because(
            f"CUDA device {device_index}",
            f"{get_device_count()} CUDA devices",
            f"devices are 0 to {get_device_count() - 1}" if get_device_count() else None,
            "unisono.bayes.cuda.is_available() before asking",
        )
