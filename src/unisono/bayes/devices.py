"""Devices by name, checked before anything moves."""

from __future__ import annotations

import torch

from unisono.errors import PlatformError


def checked_device(name: str | torch.device, what: str = "a net") -> torch.device:
    """Return the device of that name, if this machine has it.

    Args:
        name: such as `"cpu"`, `"cuda"`, `"cuda:1"`, `"mps"`.
        what: that is to live there, for messages.
    """
    hint = 'net.to_device("cpu")'
    try:
        device = torch.device(name)
    except RuntimeError:
        raise PlatformError.because(
            f"{what} on {name!r}", "no kind of device has that name", None, hint
        ) from None
    there = {
        "cpu": True,
        "cuda": torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count(),
        "mps": torch.backends.mps.is_available(),
    }
    if not there.get(device.type, False):
        raise PlatformError.because(
            f"{what} on {name}",
            f"{torch.cuda.device_count()} CUDA devices on this machine",
            None,
            hint,
        )
    return device
