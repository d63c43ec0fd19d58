"""A NaN in a net: told with its layer where it comes up, on all ranks alike, before it spreads."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.bayes.nets import trained

import unisono
from unisono.bayes import (
    AvgPool2d,
    BatchNorm2d,
    Conv2d,
    DDPConfig,
    DDPSequential,
    LayerBlock,
    Linear,
    ReLU,
    Sequential,
    manual_seed,
)
from unisono.errors import PartitionError


def net_of():
    """Return a small net."""
    manual_seed(0)
    return Sequential(Linear(2, 8), ReLU(), LayerBlock(Linear(8, 4), ReLU()), Linear(4, 1))


@pytest.mark.parametrize(
    ("key", "name", "told"),
    [
        (0, "mu_w", r"layer 0, Linear\(2,8\): mu_w"),
        (1, "var_b", r"layer 2.0, Linear\(8,4\): var_b"),
        (2, "var_w", r"layer 3, Linear\(4,1\): var_w"),
    ],
)
def test_a_nan_in_parameters_is_told_with_its_layer(key, name, told):
    net = net_of()
    layer = [leaf for _, leaf in net.leaves() if leaf.params is not None][key]
    layer.tensors()[name].view(-1)[0] = math.nan
    for call in (net, net.predict):
        with pytest.raises(PartitionError, match=rf"{told} of .* holds a NaN[\s\S]*HINT"):
            call(np.ones((3, 2)))


def test_a_nan_that_comes_up_in_a_layer_is_told_and_nothing_is_changed():
    net = net_of()
    before = net.state_dict()
    huge = np.full((3, 2), 3e38)  # finite, and their squares are not
    with pytest.raises(PartitionError, match=r"layer \d.*: its output is NaN"):
        net(huge, np.full((3, 2), 3e38))
    with pytest.raises(PartitionError, match="no forward pass"):
        net.backward()
    trained(net, np.ones((3, 2)), 0.3)
    assert net.state_dict() != before


def test_nan_deltas_are_refused_before_they_reach_parameters():
    net = net_of()
    net(np.ones((3, 2)))
    before = net.state_dict()
    net.set_delta_z([0.1, math.nan, 0.1], [0.1, 0.1, 0.1])
    with pytest.raises(PartitionError, match="deltas of the output hold a NaN"):
        net.backward()
    net.step()
    net[0].delta_mu_w = np.zeros(16)  # what was refused is not applied together with them
    net.step()
    net[0].delta_mu_w = np.full(16, math.nan)
    with pytest.raises(PartitionError, match=r"Linear\(2,8\): its deltas hold a NaN"):
        net.step()
    assert net.state_dict() == before


def test_variances_are_floored_beside_a_nan():
    net = net_of()
    arena = net.arena
    arena.var[0] = math.nan
    arena.var[1] = 1e-12
    arena.delta_var.fill_(-1.0)
    arena.delta_mean.zero_()
    arena.step(0.1)
    for _, leaf in net.leaves():
        for name, tensor in leaf.tensors().items():
            if name.startswith("var"):
                assert bool((torch.isnan(tensor) | (tensor > 0)).all())


@pytest.mark.ranks([2, 3])
@pytest.mark.parametrize("stats", [False, "running", "batch"])
def test_a_nan_of_one_rank_is_told_to_all_and_nothing_is_applied(stats):
    manual_seed(0)
    comm = unisono.world()
    plain = Sequential(
        Conv2d(1, 2, 3, in_width=4, in_height=4), BatchNorm2d(2), ReLU(), AvgPool2d(2), Linear(2, 1)
    )
    net = DDPSequential(plain, DDPConfig([], backend="auto"), sync_norm_stats=stats)

    rows = torch.randn(2, 1, 4, 4, generator=torch.Generator().manual_seed(comm.rank))
    trained(net, rows, 0.3)
    before = [net.model.arena.mean.clone(), net.model.arena.var.clone()]
    bad = rows.sign() * 3e38 if comm.rank == 1 else rows
    with pytest.raises(PartitionError, match=r"rank 1: forward: layer \d, .*NaN"):
        trained(net, bad, 0.3)
    assert torch.equal(before[0], net.model.arena.mean)
    assert torch.equal(before[1], net.model.arena.var)
    net.check_sync()
    net.eval()
    if comm.rank == 0:
        net.model[0].tensors()["mu_w"].view(-1)[0] = math.nan
        with pytest.raises(PartitionError, match="NaN"):
            net(rows)
