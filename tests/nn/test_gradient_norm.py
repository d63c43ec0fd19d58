"""Clipping gradients of networks whose parameters are split."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import unisono
from unisono.nn import (
    DistributedLinearAllGather,
    DistributedLinearReduceScatter,
    check_replicas,
    clip_grad_norm_,
    full_state_dict,
    split,
)
from unisono.topology import Partition


def compare(plain, parted, x, own, p, give):
    """Clip both alike, take a step, and compare norms and weights."""
    for net, given in ((plain, x), (parted, own)):
        net.zero_grad()
        net(given).square().sum().backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1, p)
    found = clip_grad_norm_(give(parted), 0.1, p)
    torch.testing.assert_close(found, expected)
    for net in (plain, parted):
        torch.optim.SGD(net.parameters(), 0.5).step()
    check_replicas(parted)
    state = full_state_dict(parted)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value)
    norms = unisono.world().all_gather_object(found.item())
    assert len(set(norms)) == 1, norms


@pytest.mark.ranks([2, 4])
def test_clipping_by_norm_equals_torch_on_the_undivided_network():
    size = unisono.world().size
    P = Partition([1, 1, size, 1])
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1), nn.LayerNorm([2, 9, 8]), nn.ReLU(), nn.BatchNorm2d(2)
    ).double()
    parted = split(copy.deepcopy(plain), P, blocks=True)
    x = torch.randn(2, 1, 9, 8, dtype=torch.float64)
    for p in (2.0, math.inf, 1.0):
        compare(plain, parted, x, x[P.local_slices(x.shape)], p, lambda net: net)
        compare(plain, parted, x, x[P.local_slices(x.shape)], p, lambda net: net.parameters())

    wide = Partition([1, size])
    for weights in ("replicated", "root"):
        torch.manual_seed(1)
        made = nn.Sequential(
            DistributedLinearAllGather(wide, 6, 10, weights=weights),
            nn.Tanh(),
            DistributedLinearReduceScatter(wide, 10, 5, weights=weights),
        ).double()
        both = copy.deepcopy(made)  # parameters of a copy are known as well
        mlp = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 5)).double()
        mlp.load_state_dict(full_state_dict(both))
        x = torch.randn(3, 6, dtype=torch.float64)
        for p in (2.0, math.inf):
            compare(mlp, both, x, x[wide.local_slices(x.shape)], p, lambda net: net.parameters())


@pytest.mark.ranks(2)
def test_a_norm_that_is_no_number_is_told_on_all_ranks():
    size = unisono.world().size
    layer = DistributedLinearAllGather(Partition([1, size]), 4, 4)
    assert clip_grad_norm_(layer, 1.0) == 0.0
    layer.weight.grad = torch.full_like(layer.weight, math.nan if unisono.world().rank else 1.0)
    with pytest.raises(RuntimeError, match="norm nan"):
        clip_grad_norm_(layer, 1.0, error_if_nonfinite=True)
    with pytest.raises(ValueError, match="max_norm"):
        clip_grad_norm_(layer, -1.0)
