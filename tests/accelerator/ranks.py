"""What tests on ranks with the simulated device begin with."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist

from unisono.comm import Communicator, world

OURS, TORCHS = BOTH = "cpu:shm,sim:simccl", "cpu:gloo,sim:simccl"
"""Groups that serve the CPU and the device: as worlds of ours are, and torch's own kind."""
device_ranks = functools.partial(pytest.mark.ranks, backend=OURS)
"""`@device_ranks(2)` runs a test on two ranks that have the device, in a group of both backends."""


def own_device() -> torch.device:
    """Make device `rank` the current one of this rank, and return it."""
    import simdev

    simdev.follow_environment()
    torch.accelerator.set_device_index(dist.get_rank() % torch.accelerator.device_count())
    return torch.device("sim", torch.accelerator.current_device_index())


def on_device() -> Communicator:
    """Return the world for tensors of this rank's device."""
    return world().with_device(own_device())
