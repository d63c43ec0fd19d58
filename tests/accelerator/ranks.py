"""What tests on ranks with the simulated device begin with."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist

device_ranks = functools.partial(pytest.mark.ranks, backend="cpu:gloo,sim:simccl")
"""`@device_ranks(2)` runs a test on two ranks that have the device, in a group of both backends."""


def own_device() -> torch.device:
    """Make device `rank` the current one of this rank, and return it."""
    torch.accelerator.set_device_index(dist.get_rank() % torch.accelerator.device_count())
    return torch.device("sim", torch.accelerator.current_device_index())
