"""Split layers together with other things: data parallelism, every transport."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

import unisono.nn as unn
from unisono.data_parallel import DataParallel
from unisono.topology import Mesh, Partition

HERE = Path(__file__).parent


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
