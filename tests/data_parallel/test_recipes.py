"""Recipes of the documentation: batch norm over the joined batch, losses over all pairs."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from unisono import Partition, operators
from unisono.comm import world
from unisono.data_parallel import DataParallel
from unisono.data_parallel.batch_norm import synchronised
from unisono.nn import DistributedBatchNorm


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 1)).double()


def trained(model, rows, loss=lambda out: out.square().mean()):
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for x in rows:
        optimizer.zero_grad()
        loss(model(x)).backward()
        optimizer.step()


def batches():
    return torch.randn(5, 12, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.ranks([2, 3])
def test_batch_norm_over_the_joined_batch_equals_one_process(rank_count):
    comm = world()
    plain = network()
    mine = batches().chunk(rank_count, dim=1)[comm.rank]
    trained(plain, batches())
    shared = synchronised(network(), torch.device("cpu"))
    trained(DataParallel(shared), mine)
    split = network()
    split[1] = DistributedBatchNorm(Partition([rank_count, 1]), 5, dtype=torch.float64)
    for p in split[1].parameters():  # the layer has summed them, and the mean of sums is a sum
        p.register_hook(lambda grad: grad / rank_count)
    trained(DataParallel(split), mine)
    for found in (shared, split):
        for name, value in plain.state_dict().items():
            assert torch.allclose(found.state_dict()[name], value, atol=1e-10), name


@pytest.mark.ranks([2, 3])
def test_a_loss_over_all_pairs_of_samples_equals_one_process(rank_count):
    def spread(z):
        return torch.cdist(z, z).mean()

    comm = world()
    plain = network()
    plain[1] = nn.Identity()
    split = copy.deepcopy(plain)
    mine = batches().chunk(rank_count, dim=1)[comm.rank]
    trained(plain, batches(), spread)
    trained(DataParallel(split), mine, lambda z: spread(operators.all_gather(z, comm=comm)))
    for p, q in zip(plain.parameters(), split.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-10)
