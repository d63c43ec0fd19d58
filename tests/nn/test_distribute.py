"""Ordinary networks, split: the same weights, losses and names."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import unisono
from unisono.errors import PartitionError
from unisono.nn.distribute import distribute
from unisono.nn.state import check_replicas, full_state_dict
from unisono.topology import Partition


def conv_net():
    """Return a small network with everything a typical one has."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Sequential(nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), nn.GELU()),
        nn.AvgPool2d(2, ceil_mode=True),
        nn.Flatten(),
        nn.Linear(6 * 2 * 2, 5),
    )


def data(step, batch=4):
    """Return the same batch on every rank."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(batch, 1, 9, 8, generator=generator, dtype=torch.float64)
    return x, torch.randint(5, (batch,), generator=generator)


@pytest.mark.ranks([1, 2, 4], timeout=90)
@pytest.mark.parametrize("head", ["replicate", "batch"])
def test_a_split_network_trains_as_one_process_does(head):
    size = unisono.world().size
    torch.manual_seed(unisono.world().rank)  # rank 0's weights count
    P = Partition([1, 1, 2, 2] if size == 4 else [1, 1, size, 1])
    plain = conv_net().double()
    for tensor in plain.state_dict().values():
        tensor.copy_(unisono.world().broadcast(tensor, 0))
    before = copy.deepcopy(plain.state_dict())
    state = torch.get_rng_state()
    net = distribute(plain, P, head=head)
    assert torch.equal(torch.get_rng_state(), state)
    assert list(net.state_dict()) == list(before)
    ours = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in range(6):
        x, t = data(step, batch=5 if step == 3 else 4)
        loss = nn.functional.cross_entropy(plain(x), t)
        y = net(x[P.local_slices(x.shape)])
        if head == "batch":
            own = Partition([size]).local_slices([len(x)])
            part = nn.functional.cross_entropy(y, t[own], reduction="sum") / len(x)
            part.backward()
            value = unisono.world().all_reduce(part.detach())
        else:
            value = nn.functional.cross_entropy(y, t)
            value.backward()
        torch.testing.assert_close(value.detach(), loss.detach())
        loss.backward()
        ours.step()
        theirs.step()
        ours.zero_grad()
        theirs.zero_grad()
    check_replicas(net)
    state = full_state_dict(net)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value)
    conv_net().double().load_state_dict(state)


@pytest.mark.ranks(2)
def test_shared_layers_stay_shared_and_global_pooling_works():
    P = Partition([1, 1, 2])
    conv = nn.Conv1d(3, 3, 3, padding=1).double()
    plain = nn.Sequential(conv, nn.Tanh(), conv, nn.AdaptiveAvgPool1d(1), nn.Flatten())
    for tensor in plain.state_dict().values():
        tensor.copy_(unisono.world().broadcast(tensor, 0))
    net = distribute(plain, P)
    assert len(list(net.parameters())) == 2
    x = torch.randn(2, 3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    own = x[P.local_slices(x.shape)].clone().requires_grad_()
    whole = x.clone().requires_grad_()
    y, z = net(own), plain(whole)
    torch.testing.assert_close(y, z)
    (y**2).sum().backward()
    (z**2).sum().backward()
    torch.testing.assert_close(own.grad, whole.grad[P.local_slices(x.shape)])
    torch.testing.assert_close(net[0].weight.grad, conv.weight.grad)


class Residual(nn.Module):
    """A block with a forward of its own."""

    def __init__(self):
        super().__init__()
        self.body = nn.Conv1d(2, 2, 3, padding=1)

    def forward(self, x):
        """Return x and something."""
        return x + self.body(x)


@pytest.mark.ranks(2)
def test_own_forwards_are_refused_or_trusted():
    P = Partition([1, 1, 2])
    plain = nn.Sequential(Residual())
    with pytest.raises(PartitionError, match="0 is a Residual"):
        distribute(plain, P)
    net = distribute(plain, P, custom="recurse")
    for tensor in plain.state_dict().values():
        tensor.copy_(unisono.world().broadcast(tensor, 0))
    x = torch.randn(1, 2, 6, generator=torch.Generator().manual_seed(0))
    where = P.local_slices(x.shape)
    torch.testing.assert_close(net(x[where]), plain(x)[where])


@pytest.mark.parametrize("layer", [nn.InstanceNorm1d(2), nn.LSTM(2, 2), nn.Softmax(2)])
def test_layers_without_a_split_twin_are_refused_with_their_path(layer):
    P = Partition([1, 1, 1])
    if isinstance(layer, nn.Softmax):
        distribute(nn.Sequential(layer), P)  # one rank splits nothing
        return
    with pytest.raises(PartitionError, match=f"0 is a {type(layer).__name__}"):
        distribute(nn.Sequential(layer), P)


@pytest.mark.ranks(2)
def test_dropout_differs_where_points_differ_and_agrees_in_the_head():
    P = Partition([1, 1, 2])
    net = distribute(nn.Sequential(nn.Dropout(0.5), nn.Flatten(), nn.Dropout(0.5)), P)
    first = net[0](torch.ones(1, 1, 64))
    both = unisono.world().all_gather(first)
    assert not torch.equal(both[0], both[1])
    last = unisono.world().all_gather(net[2](torch.ones(1, 64)))
    assert torch.equal(last[0], last[1])
    assert {0.0, 2.0} == set(last.unique().tolist())
