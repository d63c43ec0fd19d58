"""A field that does not fit one rank's memory is trained by four, each under the same limit."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path

import pytest
import torch
from torch import nn

import unisono
import unisono.nn as unn
from unisono.topology import Partition

CHANNELS, LENGTH = 4, 1024
SPARE = 150 << 20
"""Bytes a rank may take on top of what it holds already: the whole field needs nearly twice as much
for a step of training, a quarter of it about a third."""


def held():
    """Return the bytes of data of this process."""
    facts = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in facts if line.startswith("VmData")) << 10


@contextlib.contextmanager
def limited(most):
    """Let this process hold at most so many bytes of data."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def network():
    """Return convolutions whose activations are large and whose weights are not."""
    layers = [nn.Conv2d(1, CHANNELS, 3, padding=1), nn.Tanh()]
    for _ in range(4):
        layers += [nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.Tanh()]
    return nn.Sequential(*layers, nn.Conv2d(CHANNELS, 1, 3, padding=1))


def step(net, loss, x):
    """Train one step."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    value = loss(net(x), x)
    value.backward()
    optimizer.step()
    return value.detach()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the limit is read from /proc")
@pytest.mark.ranks(4, timeout=90)
def test_a_field_too_large_for_one_rank_is_trained_by_four():
    comm = unisono.world()
    P = Partition([1, 1, 2, 2])
    torch.manual_seed(0)
    torch.manual_seed(0)
    plain = network()
    x = torch.rand(1, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(1))
    own = x[P.local_slices(x.shape)].clone()
    net = unn.split(plain, P, blocks=True)
    loss = unn.DistributedMSELoss(P)
    step(net, loss, own[..., :16, :16].contiguous())  # what stays is made before the limit
    most = held() + SPARE

    with limited(most):
        value = step(net, loss, own)
    assert value.isfinite()
    unn.check_replicas(net)
    if comm.rank == 0:  # the very same step in one process
        with limited(most), pytest.raises((MemoryError, RuntimeError), match=r"(?i)alloc|memory"):
            step(plain, nn.MSELoss(), x)
    comm.barrier()
