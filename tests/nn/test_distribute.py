"""Ordinary networks, split: the same weights, losses and names."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import unisono
from unisono.errors import PartitionError, UnisonoError
from unisono.nn.distribute import distribute
from unisono.nn.state import check_replicas, full_state_dict, no_sync
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


class Scaled(nn.Module):
    """A block with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.body = nn.Conv2d(2, 3, 3, padding=1)
        self.scale = nn.Parameter(torch.ones(3, 1, 1))

    def forward(self, x):
        """Return the scaled convolution."""
        return self.body(x) * self.scale


class WholeNet(nn.Module):
    """A network with a forward of its own and a head behind a mean over space."""

    def __init__(self):
        super().__init__()
        self.body = Scaled()
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 4))
        self.last = nn.Linear(4, 2)

    def forward(self, x):
        """Return the scores."""
        return self.last(self.pool(self.body(x)))


class Recurrent(nn.Module):
    """A head whose layers do not read their parameters as attributes of their own."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        """Return one vector a sample."""
        y, _ = self.lstm(x.reshape(len(x), -1, 3))
        return self.attention(y, y, y)[0].sum(1)


NETS = {
    "mean over space": lambda: nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Conv2d(3, 3, 1),
        nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(3, 2),
    ),
    "Flatten inside": lambda: nn.Sequential(
        nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Flatten()), nn.Linear(3 * 8 * 6, 2)
    ),
    "norm behind": lambda: nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.PReLU(3), nn.Flatten(), nn.Linear(3 * 8 * 6, 4),
        nn.BatchNorm1d(4), nn.PReLU(), nn.Linear(4, 2),
    ),
    "own forward": WholeNet,
    "recurrent": lambda: nn.Sequential(Scaled(), nn.Flatten(), Recurrent()),
}  # fmt: skip


@pytest.mark.ranks(4, timeout=90)
@pytest.mark.parametrize("head", ["replicate", "batch"])
def test_every_parameter_of_a_split_network_gets_the_gradient_of_one_process(head):
    grids = ([1, 1, 4, 1], [2, 1, 2, 1])
    x = torch.randn(5, 2, 8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for name, make in NETS.items():
        for grid in grids:
            P = Partition(grid)
            torch.manual_seed(3)
            plain = make().double()
            net = distribute(plain, P, head=head, custom="recurse")
            rows = Partition([4]).local_slices([5])[0] if head == "batch" else slice(None)
            y, z = net(x[P.local_slices(x.shape)]), plain(x)
            torch.testing.assert_close(y, z[rows], msg=lambda m, n=name: f"{n}: {m}")
            probe = torch.linspace(-1, 1, z.numel(), dtype=z.dtype).reshape(z.shape)
            (y.square() * probe[rows]).sum().backward()
            (z.square() * probe).sum().backward()
            ours = dict(net.named_parameters())
            assert list(ours) == [key for key, _ in plain.named_parameters()]
            for key, p in plain.named_parameters():
                where = f"{name} on {grid}, {key}"
                torch.testing.assert_close(
                    ours[key].grad, p.grad, msg=lambda m, w=where: f"{w}: {m}"
                )
            state = net.state_dict()
            for key, value in plain.state_dict().items():
                torch.testing.assert_close(state[key], value, msg=lambda m, k=key: f"{k}: {m}")
            assert not any("scale" in vars(layer) for layer in net.modules())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("head", ["replicate", "batch"])
def test_gradients_of_several_backwards_are_summed_once_at_the_end(head):
    P = Partition([1, 1, 2, 1])
    torch.manual_seed(5)
    plain = conv_net().double()
    net = distribute(plain, P, head=head)

    def backward(step):
        x, _ = data(step)
        net(x[P.local_slices(x.shape)]).square().sum().backward()
        plain(x).square().sum().backward()

    backward(0)
    conv = net[0].weight
    before = conv.grad.clone()
    with pytest.raises(PartitionError), no_sync(net):
        net(backward(1))  # no tensor
    assert torch.equal(conv.grad, before)  # as if the block had not been
    net.zero_grad()
    plain.zero_grad()
    backward(2)
    with no_sync(net):
        backward(3)
        assert not torch.allclose(conv.grad, plain[0].weight.grad)  # own part, of this block alone
        backward(4)
    for (key, p), q in zip(net.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=lambda m, k=key: f"{k}: {m}")


class Gated(nn.Module):
    """A block that multiplies blocks by a value that is whole on every rank."""

    def __init__(self, *gate):
        super().__init__()
        self.gate = nn.Sequential(*gate) if len(gate) > 1 else gate[0]

    def forward(self, x):
        """Return the gated input."""
        return x * self.gate(x)


class Aside(nn.Module):
    """A network whose children do not stand in the order of its forward."""

    def __init__(self):
        super().__init__()
        self.aside = nn.Sequential(nn.Flatten(), nn.Linear(32, 2))
        self.body = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x):
        """Return two things."""
        return self.body(x), self.aside(x)


def test_a_value_that_is_whole_on_every_rank_is_refused_in_forwards_of_their_own():
    P = Partition([1, 1, 1, 1])
    pool = nn.AdaptiveAvgPool2d(1)
    for net, path in (
        (nn.Sequential(Gated(pool)), "0.gate is an AdaptiveAvgPool2d"),
        (nn.Sequential(Gated(pool, nn.Conv2d(2, 2, 1))), "0.gate gathers"),
        (nn.Sequential(Gated(nn.Flatten(), nn.Linear(32, 2))), "0.gate gathers"),
        (Aside(), "body stands behind aside"),
    ):
        with pytest.raises(PartitionError, match=rf"{path}[\s\S]*HINT: .*nn\.Sequential"):
            distribute(net, P, custom="recurse")


def test_layers_stay_in_the_mode_they_were_in():
    plain = nn.Sequential(nn.Conv1d(2, 2, 1), nn.BatchNorm1d(2), nn.Flatten(), nn.Dropout())
    plain[1].eval()
    plain[3].eval()
    net = distribute(plain, Partition([1, 1, 1]))
    assert [layer.training for layer in net] == [True, False, True, False]


@pytest.mark.parametrize("layer", [nn.InstanceNorm2d(2), nn.LSTM(2, 2), nn.Softmax(2)])
def test_layers_without_a_split_twin_are_refused_with_their_path(layer):
    P = Partition([1, 1, 1])
    if isinstance(layer, nn.Softmax):
        distribute(nn.Sequential(layer), P)  # one rank splits nothing
        return
    with pytest.raises(PartitionError, match=f"0 is an? {type(layer).__name__}"):
        distribute(nn.Sequential(layer), P)


class Thinned(nn.Module):
    def forward(self, x):
        return nn.functional.dropout(x, 0.5, self.training)


class Plain(nn.Module):
    def forward(self, x):
        return 2 * x


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "layer",
    [
        nn.AlphaDropout(0.5),
        nn.RReLU(),
        nn.TransformerEncoderLayer(64, 2, 8, dropout=0.5, batch_first=True),
        Thinned(),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_every_random_layer_of_a_replicated_head_draws_the_same_on_all_ranks(layer):
    comm, x = unisono.world(), -torch.ones(3, 64)
    net = distribute(nn.Sequential(nn.Flatten(), layer), Partition([1, 1, 2]))
    torch.manual_seed(comm.rank)
    seen = [net[1](x) for _ in range(2)]
    after = torch.rand(3)
    torch.manual_seed(comm.rank)
    torch.randint(2**62, (2,))  # one number a call
    assert torch.equal(torch.rand(3), after)
    assert not torch.equal(*seen)
    assert all(comm.all_equal(y) for y in seen)
    again = copy.deepcopy(net)
    assert torch.equal(again[1](x), net[1](x))
    own = torch.get_rng_state()
    net.eval()
    assert torch.equal(net[1](x), net[1](x))
    with pytest.raises(TypeError):
        net.train()[1](None, None, None, None, None, None)
    assert torch.equal(torch.get_rng_state(), own)  # nothing was drawn in either


@pytest.mark.ranks(2)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("which", [0, 1, 3])
def test_random_layers_that_are_computed_again_draw_what_they_drew(which, reentrant):
    plain = nn.Sequential(nn.Dropout(0.5), nn.Dropout1d(0.5), nn.Flatten(), nn.AlphaDropout(0.5))
    net = distribute(plain, Partition([1, 1, 2]))[which]
    xs = [torch.ones(3, 4, 8, requires_grad=True) for _ in range(2)]
    ys = [checkpoint(net, x, use_reentrant=reentrant) for x in xs]  # before any backward
    for x, y in zip(reversed(xs), reversed(ys), strict=True):
        y.sum().backward()
        value, is_kept = y.detach().reshape(x.shape), x.grad != 0
        assert len(value[is_kept].unique()) == len(value[~is_kept].unique()) == 1
        assert value[is_kept][0] != value[~is_kept][0]
    y = checkpoint(net, xs[0], use_reentrant=reentrant, preserve_rng_state=False)
    torch.rand(1)
    with pytest.raises(UnisonoError, match=r"HINT: .*preserve_rng_state=True"):
        y.sum().backward()


@pytest.mark.ranks(2)
def test_a_head_of_ones_own_that_draws_nothing_leaves_the_generator_alone():
    net = distribute(nn.Sequential(nn.Flatten(), Plain()), Partition([1, 1, 2]))
    x, before = torch.ones(3, 4, requires_grad=True), torch.get_rng_state()
    checkpoint(net[1], x, use_reentrant=False).sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.ranks(2)
def test_dropout_differs_where_points_differ_and_agrees_in_the_head():
    P = Partition([1, 1, 2])
    torch.manual_seed(unisono.world().rank)  # what else ranks draw does not matter
    plain = nn.Sequential(nn.Dropout(0.5), nn.Flatten(), nn.Dropout(0.5))
    net = distribute(plain, P)
    first = net[0](torch.ones(1, 1, 64))
    both = unisono.world().all_gather(first)
    assert not torch.equal(both[0], both[1])
    last = unisono.world().all_gather(net[2](torch.ones(1, 64)))
    assert torch.equal(last[0], last[1])
    assert {0.0, 2.0} == set(last.unique().tolist())
    own = distribute(plain, P, head="batch")[2](torch.ones(1, 64))  # samples of its own
    assert not torch.equal(*unisono.world().all_gather(own).unbind())
