"""Layers keep no group, thread, file or memory when they are dropped."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import threading
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import unisono
import unisono.nn as unn
from unisono.comm import groups
from unisono.topology import Partition


@pytest.mark.ranks(2, backend="shm", timeout=60)
def test_ten_thousand_layers_make_no_new_group_thread_or_file_and_keep_no_memory(proof):
    P = Partition([1, 1, 2])
    x = torch.ones(1, 2, 4)
    for case in proof.zoo():
        case.check()

    def held():
        return (
            groups.count(),
            len(torch.distributed.distributed_c10d._world.pg_map),
            threading.active_count(),
            len(list(Path("/proc/self/fd").iterdir())),
            len(list(Path("/proc/self/task").iterdir())),
        )

    def resident():
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before, memory = held(), 0
    for i in range(10_000):
        if i % 10 == 0:
            layer = unn.DistributedFeatureConv1d(P, 2, 2, 3, padding=1)
            if i % 100 == 0:
                layer(x).sum().backward()
        else:
            layer = unn.DistributedMaxPool1d(P, 2)
        if i == 2000:  # caches and the allocator have what they need
            memory = resident()
    assert resident() - memory < 4 << 20  # 8000 layers more; 500 bytes of each would be seen
    for case in proof.zoo():
        case.check()
    assert held() == before
    unisono.world().barrier()


@pytest.mark.ranks(2)
def test_layers_that_are_dropped_leave_no_memory_behind():
    P = Partition([1, 1, 2])
    layer = unn.DistributedFeatureConv1d(P, 2, 2, 3, padding=1)
    layer(torch.ones(1, 2, 4, requires_grad=True)).sum().backward()
    seen = [weakref.ref(layer), weakref.ref(layer.weight)]
    del layer
    gc.collect()
    assert [ref() for ref in seen] == [None, None]


CHANNELS, LENGTH = 4, 1024


SPARE = 150 << 20


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
