"""Ordinary networks, split, with blocks in and out: the weights, losses and names of one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import unisono
from unisono.errors import PartitionError
from unisono.nn import (
    DistributedMaxPool2d,
    DistributedMSELoss,
    check_replicas,
    full_state_dict,
    no_sync,
    split,
)
from unisono.topology import Partition

ROWS = [1, 1, 2, 1]


def split_copy(net, partition):
    """Return a split copy of a network, with blocks as results."""
    return split(copy.deepcopy(net), partition, blocks=True)


def conv(channels=1):
    return nn.Conv2d(channels, channels, 3, padding=1)


def conv_net():
    """Return a small network with everything a typical one has."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, padding_mode="circular"),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.ConvTranspose2d(6, 3, 2, stride=2),
        nn.Upsample(scale_factor=1.5),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(27, 5),
    )


def data(step, batch=4):
    """Return the same batch on every rank."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(batch, 1, 8, 9, generator=generator, dtype=torch.float64)
    return x, torch.randint(5, (batch,), generator=generator)


@pytest.mark.ranks([1, 2, 3, 4], timeout=90)
def test_a_split_network_trains_as_one_process_does():
    size = unisono.world().size
    torch.manual_seed(0)
    P = Partition([1, 1, 2, 2] if size == 4 else [1, 1, size, 1])
    plain = conv_net().double()
    state = torch.get_rng_state()
    net = split_copy(plain, P)
    assert torch.equal(torch.get_rng_state(), state)
    assert list(net.state_dict()) == list(plain.state_dict())
    ours = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in range(20):
        x, t = data(step, batch=5 if step % 7 == 3 else 4)
        value = nn.functional.cross_entropy(net(x[P.local_slices(x.shape)]), t)
        loss = nn.functional.cross_entropy(plain(x), t)
        torch.testing.assert_close(value.detach(), loss.detach())
        for each, optimizer in ((value, ours), (loss, theirs)):
            each.backward()
            optimizer.step()
            optimizer.zero_grad()
    check_replicas(net)
    state = full_state_dict(net)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value)
    conv_net().double().load_state_dict(state)


class Scaled(nn.Module):
    """A skip, and a parameter of its own."""

    def __init__(self, body):
        super().__init__()
        self.body = body
        self.scale = nn.Parameter(torch.ones(2, 1, 1))

    def forward(self, x):
        return x + self.body(x) * self.scale


class Recurrent(nn.Module):
    """A head that needs whole samples."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 4, batch_first=True)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        y, _ = self.lstm(x.mean(1))
        return self.attention(y, y, y)[0].sum(1)


def tied(first, *others):
    for other in others:
        other.weight = first.weight
    return first, *others


NETS = {
    "tied": lambda: nn.Sequential(*tied(conv(2), conv(2), conv(2))),
    "shared": lambda: nn.Sequential(k := conv(2), nn.Tanh(), k, nn.AdaptiveAvgPool2d(1)),
    "own forward": lambda: nn.Sequential(Scaled(conv(2)), nn.PReLU(2), Scaled(nn.Tanh())),
    "weight norm": lambda: nn.Sequential(parametrizations.weight_norm(conv(2)), nn.Softmax(2)),
    "around a head": lambda: nn.Sequential(
        k := conv(2), nn.Flatten(), nn.Linear(128, 128), nn.Unflatten(1, (2, 8, 8)), k
    ),
    "norms": lambda: nn.Sequential(
        conv(2), nn.LayerNorm((2, 8, 8)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.BatchNorm1d(2)
    ),
    "recurrent": lambda: nn.Sequential(conv(2), Recurrent()),
}


@pytest.mark.ranks([2, 3], timeout=90)
@pytest.mark.parametrize("name", NETS)
def test_every_parameter_gets_the_gradient_of_one_process(name):
    P = Partition([1, 1, unisono.world().size, 1])
    torch.manual_seed(1)
    plain = NETS[name]().double()
    net = split_copy(plain, P)

    def backward(batch):
        generator = torch.Generator().manual_seed(batch)
        x = torch.randn(batch, 2, 8, 8, dtype=torch.float64, generator=generator)
        y, z = net(x[P.local_slices(x.shape)]), plain(x)
        own = () if y.shape == z.shape else P.local_slices(z.shape)
        torch.testing.assert_close(y, z[own])
        probe = torch.linspace(-1, 1, z.numel(), dtype=z.dtype).view(z.shape)
        (probe[own] * y.square()).sum().backward()
        (probe * z.square()).sum().backward()

    def compare():
        for p, q in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)

    backward(4)
    compare()
    with pytest.raises(RuntimeError, match="no"), no_sync(net):  # noqa: PT012
        backward(2)
        raise RuntimeError("no")
    plain.zero_grad()
    net.zero_grad()
    with no_sync(net):  # summed once, at the end
        backward(3)
        backward(2)
    compare()
    for value, wanted in zip(net.state_dict().values(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(value, wanted)
    check_replicas(net)


@pytest.mark.ranks(2)
def test_own_blocks_go_to_layers_and_losses_of_the_same_partition():
    P = Partition(ROWS)
    torch.manual_seed(0)
    plain = conv(2)
    net, pool, loss = split_copy(plain, P), DistributedMaxPool2d(P, 2), DistributedMSELoss(P)
    x = torch.randn(2, 2, 8, 8, generator=torch.Generator().manual_seed(0))
    y = net(x[P.local_slices(x.shape)])
    assert type(y) is torch.Tensor
    wanted = nn.functional.max_pool2d(plain(x), 2).square().mean()
    found = loss(pool(y), torch.zeros(2, 2, 2, 4))
    torch.testing.assert_close(found, wanted)
    found.backward()
    wanted.backward()
    torch.testing.assert_close(net.module.weight.grad, plain.weight.grad)
    with pytest.raises(PartitionError, match=r"a split tensor.*x\.local"):
        pool(split(plain, P)(x[P.local_slices(x.shape)]))
