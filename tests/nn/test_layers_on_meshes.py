"""Split layers together with other things: data parallelism, every transport."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import unisono
import unisono.nn as unn
from unisono.data_parallel import DataParallel
from unisono.topology import Mesh, Partition

HERE = Path(__file__).parent


def batch(step, size=4):
    """Return the same images and labels on every rank."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(size, 1, 8, 9, generator=generator)
    return x, torch.randint(5, (size,), generator=generator)


@pytest.mark.ranks(4, timeout=60)
@pytest.mark.parametrize("normed", [False, True])
def test_space_on_one_axis_of_a_mesh_and_data_on_the_other_equal_one_process(normed):
    mesh = Mesh(data=2, h=2)
    P = Partition.from_mesh(mesh, {"h": 2}, ndim=4)
    assert P.shape == (1, 1, 2, 1)
    assert P.active
    layers = [nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2), nn.Conv2d(4, 2, 3)]
    if normed:
        layers.insert(1, nn.LayerNorm([4, 8, 9]))
    torch.manual_seed(unisono.world().rank)  # rank 0's weights count
    plain = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, 5)).double()
    for tensor in plain.state_dict().values():
        tensor.copy_(unisono.world().broadcast(tensor, 0))
    net = DataParallel(unn.distribute(plain, P), comm=mesh.comm("data"))
    whole = copy.deepcopy(plain)
    ours = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    theirs = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    half = mesh.coordinate("data")
    for step in range(4):
        x, t = batch(step)
        x = x.double()
        mine = x[2 * half : 2 * half + 2]
        loss = cross_entropy(net(mine[P.local_slices(mine.shape)]), t[2 * half : 2 * half + 2])
        expected = cross_entropy(whole(x), t)
        for optimizer, value in ((ours, loss), (theirs, expected)):
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
        mean = mesh.comm("data").all_reduce(loss.detach()) / 2
        torch.testing.assert_close(mean, expected.detach())
    unn.check_replicas(net)
    state = unn.full_state_dict(net.module)
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(state[name], value)


@pytest.mark.ranks(4)
def test_split_weights_under_data_parallel_equal_one_process(proof):
    mesh = Mesh(data=2, features=2)
    P = Partition.from_mesh(mesh, {"features": 1})
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3)).double()
    columns = unn.DistributedLinearAllGather(P, 6, 8, dtype=torch.float64)
    rows = unn.DistributedLinearReduceScatter(P, 8, 3, dtype=torch.float64)
    inner = nn.Sequential(columns, nn.GELU(), rows)
    inner.load_state_dict(plain.state_dict())
    net = DataParallel(inner, comm=mesh.comm("data"))
    x = proof.drawn(4, 6)
    half = mesh.coordinate("data")
    mine = x[2 * half : 2 * half + 2]
    y = net(mine[P.local_slices(mine.shape)])
    (y**2).sum().backward()
    (plain(x) ** 2).sum().backward()
    for name, p in inner.named_parameters():
        layer = inner[int(name[0])]
        expected = plain.get_parameter(name).grad[layer._holdings[name[2:]].slices]
        torch.testing.assert_close(p.grad * 2, expected)  # the mean over two halves of the data


@pytest.mark.ranks([2, 3], backend=["gloo", "shm"])
def test_every_layer_equals_torch_over_every_transport(proof):
    for case in proof.zoo():
        case.check()


@pytest.mark.mpi
@pytest.mark.timeout(300)
def test_every_layer_equals_torch_over_mpi(mpiexec, warm_python):
    done = subprocess.run(
        [mpiexec, "-n", "2", warm_python, "-W", "ignore", str(HERE / "mpi_layers.py")],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "UNISONO_TIMEOUT_S": "60"},
    )
    assert done.returncode == 0, done.stdout[-5000:]
    (names,) = re.findall(r"PASSED (.*)", done.stdout)
    assert len(json.loads(names)) >= 20
