"""pytagi's `cuda` module."""

from __future__ import annotations

from unisono.bayes.cuda import (
    get_current_device,
    get_device_count,
    get_device_memory,
    get_device_properties,
    is_available,
    is_device_available,
    is_nccl_available,
    set_device,
)

__all__ = [
    "get_current_device",
    "get_device_count",
    "get_device_memory",
    "get_device_properties",
    "is_available",
    "is_device_available",
    "is_nccl_available",
    "set_device",
]
