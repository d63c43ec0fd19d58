"""Plans that are kept, hooks, and states that load at another rank count."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import unisono
import unisono.nn as unn
from unisono.errors import CollectiveMismatch, PartitionError, RankTimeout
from unisono.topology import Partition


@pytest.mark.ranks(2)
def test_returning_to_a_known_shape_makes_no_new_plan():
    P = Partition([1, 1, 2])
    layer = unn.DistributedFeatureConv1d(P, 1, 1, 3, padding=1)
    made = []
    plan_of = layer._make_plan
    layer._make_plan = lambda tables: made.append(1) or plan_of(tables)
    for length in (4, 6, 4, 6, 4):
        layer(torch.ones(1, 1, length))
    assert len(made) == 2
    for length in range(1, 12):
        layer(torch.ones(1, 1, length))
    assert len(layer._plans) == 8


class Watched(unn.DistributedMSELoss):
    """A layer whose hook is overridden, as a function of module and input."""

    @staticmethod
    def _distdl_forward_pre_hook(module, input):
        module.seen.append(len(input))
        unn.DistributedMSELoss._distdl_forward_pre_hook(module, input)
        return (input[0] * module.factor, *input[1:]) if module.factor != 1 else None


@pytest.mark.ranks([1, 2])
def test_the_hook_before_a_forward_may_be_overridden():
    P = Partition([unisono.world().size, 1])
    layer = Watched(P)
    layer.seen, layer.factor = [], 1
    x, zero = torch.full((2, 3), 2.0), torch.zeros(2, 3)
    for made in (layer, copy.deepcopy(layer)):
        assert made(x, zero) == made(x, target=zero) == 4
        made.factor = 3
        assert made(x, zero) == made(x, target=zero) == 36
        assert made.seen == [2, 2, 2, 2]
        assert made._setups == 1


def network(size=0):
    """Return a network with every way to hold weights, split on `size` ranks; 0: that of torch."""
    conv, wide = (1, 1, size), (1, size)

    def made(name, plain, grids, *args, **options):
        if not size:
            return plain(*args)
        parts = [Partition(grid) for grid in grids]
        return getattr(unn, f"Distributed{name}")(*parts, *args, **options)

    return nn.ModuleDict(
        {
            "conv": made("FeatureConv1d", nn.Conv1d, [conv], 2, 4, 3),
            "root": made("FeatureConv1d", nn.Conv1d, [conv], 2, 4, 3, weights="root"),
            "norm": made("BatchNorm", nn.BatchNorm1d, [(1, size, 1)], 5),
            "layer": made("LayerNorm", nn.LayerNorm, [wide], 7),
            "grid": made("Linear", nn.Linear, [wide, (1, 1), wide], 7, 5),
            "columns": made("LinearAllGather", nn.Linear, [wide], 7, 5),
            "rows": made("LinearReduceScatter", nn.Linear, [wide], 7, 5),
            "table": made("Embedding", nn.Embedding, [wide], 9, 4, split="vocab"),
            "plain": nn.Linear(2, 2),
        }
    )


def numbered(state):
    """Return a state in which every number differs."""
    at = 0
    made = {}
    for key, value in state.items():
        count = value.numel()
        made[key] = torch.arange(at, at + count).reshape(value.shape).to(value.dtype)
        at += count
    return made


@pytest.mark.ranks(4)
def test_states_go_from_four_ranks_to_one_to_three_and_to_torch_and_back():
    state = numbered(network().state_dict())
    for size in (4, 1, 3, 2):
        net = network(size)
        net.load_state_dict(copy.deepcopy(state))
        found = net.state_dict()
        assert list(found) == list(state)
        for key, value in state.items():
            assert torch.equal(found[key], value), (size, key)
        torch_net = network()
        torch_net.load_state_dict(found)
        state = {k: v.clone() for k, v in torch_net.state_dict().items()}
    one = unn.full_state_dict(network(4), rank=2)
    assert bool(one) == (unisono.world().rank == 2)


@pytest.mark.ranks(4)
def test_sharded_states_load_at_the_same_rank_count(tmp_path):
    state = numbered(network().state_dict())
    net = network(4)
    net.load_state_dict(state)
    with unn.state_dict_mode("sharded"):
        blocks = net.state_dict()
    path = tmp_path / f"{unisono.world().rank}.pt"
    torch.save(blocks, path)
    blocks = torch.load(path, weights_only=True)
    other = network(4)
    other.load_state_dict(blocks)
    for key, value in other.state_dict().items():
        assert torch.equal(value, state[key]), key
    alone = network(1)
    if unisono.world().rank == 0:
        with pytest.raises(PartitionError, match="this rank holds"):
            alone.load_state_dict(blocks)


@pytest.mark.ranks(2)
def test_a_state_asked_for_on_one_rank_only_says_whom_it_waits_for():
    comm = unisono.world().with_timeout(1.0)
    net = unn.DistributedLinearAllGather(Partition([1, 2], comm=comm), 3, 4)
    if comm.rank == 0:
        with pytest.raises(RankTimeout, match="HINT") as caught:
            unn.full_state_dict(net)
        assert "all ranks" in str(caught.value)


@pytest.mark.ranks([2, 4])
def test_optimizer_steps_keep_replicas_equal_to_the_bit(proof):
    size = unisono.world().size
    P = Partition([2, 1, 2] if size == 4 else [1, 1, 2])
    net = nn.Sequential(
        unn.DistributedFeatureConv1d(P, 2, 4, 3, padding=1),
        unn.DistributedBatchNorm(P, 4),
        unn.DistributedFeatureConvTranspose1d(P, 4, 4, 2, stride=2),
        unn.DistributedLayerNorm(P, 14),
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for step in range(5):
        x = proof.drawn(4, 2, 7, dtype=torch.float32, seed=step)
        loss = unn.DistributedMSELoss(P)
        y = net(x[P.local_slices(x.shape)])
        loss(y, torch.zeros_like(y)).backward()
        optimizer.step()
        optimizer.zero_grad()
    unn.check_replicas(net)
    if unisono.world().rank == 1:
        with torch.no_grad():
            net[0].bias[0] += 1.0
    with pytest.raises(CollectiveMismatch, match=r"0\.bias[\s\S]*ranks 0 and 1[\s\S]*difference 1"):
        unn.check_replicas(net)


@pytest.mark.ranks(2)
def test_replicas_that_are_alike_in_a_value_that_is_no_number_are_equal():
    conv = unn.DistributedFeatureConv1d(Partition([1, 1, 2]), 1, 3, 1)
    with torch.no_grad():
        conv.bias.copy_(torch.tensor([torch.nan, torch.inf, -torch.inf]))
    unn.check_replicas(conv)
    if unisono.world().rank == 1:
        with torch.no_grad():
            conv.bias[0] = 1.0
    with pytest.raises(CollectiveMismatch, match=r"bias[\s\S]*ranks 0 and 1[\s\S]*difference nan"):
        unn.check_replicas(conv)


@pytest.mark.ranks(2)
def test_replicas_in_the_head_of_a_split_network_are_compared_too():
    P = Partition([1, 1, 2])
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv1d(1, 1, 3, padding=1), nn.Flatten(), nn.Linear(8, 2))
    net = unn.split(plain, P, blocks=True)
    unn.check_replicas(net)
    if unisono.world().rank == 1:
        with torch.no_grad():
            net.module[2].weight[0, 0] += 0.5
    with pytest.raises(CollectiveMismatch, match=r"2\.weight[\s\S]*difference 0\.5"):
        unn.check_replicas(net)


@pytest.mark.ranks(3)
def test_ranks_outside_save_the_state_of_those_inside():
    P = Partition([2, 1])
    norm = unn.DistributedBatchNorm(P, 3)
    x = torch.arange(12.0).reshape(4, 3)
    plain = nn.BatchNorm1d(3)
    for _ in range(2):
        plain(x)
        norm(x[P.local_slices(x.shape)] if P.active else torch.empty(0))
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(norm.state_dict()[key], value)
