"""DDPW's `functional` module."""

from __future__ import annotations

from unisono.launch import Device, Platform
from unisono.launch.functional import (
    average_params_grads,
    device,
    get_dataset_sampler,
    has_batch_norm,
    optimiser_to,
    seed_generators,
    set_default_device,
    set_device,
    to,
)

__all__ = [
    "Device",
    "Platform",
    "average_params_grads",
    "device",
    "get_dataset_sampler",
    "has_batch_norm",
    "optimiser_to",
    "seed_generators",
    "set_default_device",
    "set_device",
    "to",
]
