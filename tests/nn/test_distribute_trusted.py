"""Forwards of a user's own in a split network: what looks along a split dim is refused."""

from __future__ import annotations

import copy
import pickle

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import unisono
from unisono.errors import PartitionError
from unisono.nn import Repartition, distribute, plan_report
from unisono.topology import Partition


class Does(nn.Module):
    """A module whose forward is a function of the module and its input."""

    def __init__(self, what):
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        self.relu = nn.ReLU()
        self.scale = nn.Parameter(torch.rand(2, 1, 1) + 0.5)
        self.square = nn.Parameter(torch.rand(2, 2))
        self.register_buffer("shift", torch.tensor([0.5, -0.5]).view(1, 2, 1, 1))
        self.what = what

    def forward(self, x):
        """Return what it is told to."""
        return self.what(self, x)


class Twice(torch.autograd.Function):
    """A function of a user's own."""

    @staticmethod
    def forward(ctx, x):
        """Return the double."""
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        """Return the double."""
        return 2 * grad


class Centred(torch.autograd.Function):
    """One that looks at all points."""

    @staticmethod
    def forward(ctx, x):
        """Subtract the mean."""
        return x - x.mean((2, 3), keepdim=True)

    @staticmethod
    def backward(ctx, grad):
        """Do the same."""
        return grad - grad.mean((2, 3), keepdim=True)


def attention(m, x):
    """Let all pixels look at all others."""
    rows = x.flatten(2).transpose(1, 2)
    return F.scaled_dot_product_attention(rows, rows, rows).transpose(1, 2).view(x.shape)


def by_hand(m, x):
    """Attention along the height, written out."""
    scores = torch.einsum("nchw,ncvw->nwhv", x, x).softmax(-1)
    return torch.einsum("nwhv,ncvw->nchw", scores, x)


def positions(m, x):
    """Add a number for each row."""
    return x + torch.linspace(0, 1, x.shape[2]).view(1, 1, -1, 1)


def written(m, x):
    """Set the first row to zero."""
    y = x.clone()
    y[:, :, 0] = 0
    return y


def branch(m, x):
    """Decide by a value."""
    return x if x[0, 0].abs().any(-1).any() else 2 * x


def scripted(x):
    """Return what nobody can follow."""
    unit = torch.jit.CompilationUnit("def f(x):\n    return x - x.mean()\n")
    return unit.f(x)


def operator(m, x):
    """Call an operator without a function."""
    return getattr(torch, "ops").aten.mean.dim(x, [2, 3], True)  # noqa: B009


WRONG = {
    "mean": (lambda m, x: x * x.mean((2, 3), keepdim=True), "dim 2", r"AdaptiveAvgPool2d\(1\)"),
    "mean of all": (lambda m, x: x - x.mean(), "dim 2", "AdaptiveAvgPool2d"),
    "sum": (lambda m, x: x / x.sum(dim=-2, keepdim=True), "dim 2", "unisono.nn.Module"),
    "max": (lambda m, x: x - x.amax((2, 3), True), "dim 2", "unisono.nn.Module"),
    "interpolate": (lambda m, x: F.interpolate(x, scale_factor=2), "dim 2", "nn.Upsample"),
    "conv2d": (
        lambda m, x: F.conv2d(x, m.square.view(2, 2, 1, 1).expand(2, 2, 3, 3), padding=1),
        "dim 2",
        "child nn.Conv2d",
    ),
    "pool": (lambda m, x: F.max_pool2d(x, 2), "dim 2", "nn.MaxPool2d"),
    "norm": (lambda m, x: F.group_norm(x, 1), "dim 2", "nn.GroupNorm"),
    "batch_norm": (lambda m, x: F.batch_norm(x, None, None, training=True), "dim 2", "BatchNorm"),
    "pad": (lambda m, x: F.pad(x, (0, 0, 1, 1)), "dim 2", "nn.ZeroPad2d"),
    "attention": (attention, "dim 2", "nn.Flatten"),
    "by hand": (by_hand, "dim 2", "unisono.nn.Module"),
    "matmul": (lambda m, x: x @ x.mT @ x, "dim 2|dim 3", "unisono.nn.Module"),
    "crop": (lambda m, x: x[:, :, : x.shape[2] - 1], "dim 2", "nn.ZeroPad2d"),
    "shift": (lambda m, x: x[:, :, 1:] - x[:, :, :-1], "dim 2", "nn.ZeroPad2d"),
    "far crop": (lambda m, x: x[:, :, :100], "dim 2", "nn.ZeroPad2d"),
    "far narrow": (lambda m, x: x.narrow(2, 1, 3), "dim 2", "nn.ZeroPad2d"),
    "every other": (lambda m, x: x[:, :, ::2], "dim 2", "nn.ZeroPad2d"),
    "narrow": (lambda m, x: x.narrow(2, 0, 1), "dim 2", "nn.ZeroPad2d"),
    "roll": (lambda m, x: x.roll(1, 2), "dim 2", "unisono.nn.Module"),
    "flip": (lambda m, x: x.flip(2), "dim 2", "unisono.nn.Module"),
    "cumsum": (lambda m, x: x.cumsum(2), "dim 2", "unisono.nn.Module"),
    "softmax": (lambda m, x: x.softmax(2), "dim 2", "unisono.nn.Module"),
    "joined": (lambda m, x: torch.cat([x, x], 2), "dim 2", "unisono.nn.Module"),
    "linear": (lambda m, x: F.linear(x.mT, torch.ones(3, x.shape[2])), "dim 3", "unisono.nn"),
    "flat": (lambda m, x: m.conv(x).flatten(1), "dim 2", "nn.Flatten"),
    "positions": (positions, "dim 2", "zeros_like"),
    "written": (written, "dim 2", "nn.ZeroPad2d"),
    "a number": (branch, "dim 0", "unisono.nn.Module"),
    "item": (lambda m, x: x * x[0, 0].norm(dim=1).square().detach().tolist()[0], "dim 0", ""),
    "turned": (lambda m, x: m.conv(x.mT), r"split dims are \[3\]", "same order"),
    "whole": (lambda m, x: x + m.conv(m.shift), "split dims are none", "same order"),
    "drawn": (lambda m, x: x + torch.rand(1, 2, 1, 1), "rand draws", "nn.Dropout"),
    "dropout": (lambda m, x: F.dropout(x, 0.5), "dropout draws", "nn.Dropout"),
    "sort": (lambda m, x: torch.sort(x, 2)[0], "dim 2", "unisono.nn.Module"),
    "unknown": (lambda m, x: torch.linalg.svdvals(x), "dim 2", "unisono.nn.Module"),
    "operator": (operator, "dim 2", "Adaptive"),
    "function": (lambda m, x: Centred.apply(x), "dim 2", "Adaptive"),
    "another's": (lambda m, x: x * m.conv.weight.sum(), "own points alone", "owns it"),
    "scripted": (lambda m, x: x + scripted(m.conv(x)), "nobody knows", "torch.jit.script"),
    "scripted at last": (lambda m, x: scripted(m.conv(x)), "nobody knows", "torch.jit.script"),
    "reentrant": (
        lambda m, x: checkpoint(lambda y: y * m.scale, m.conv(x), use_reentrant=True),
        "gradients of parameters do not meet",
        "use_reentrant=False",
    ),
    "vmap": (lambda m, x: torch.vmap(lambda y: y - y.mean())(x), "torch.func", "einsum"),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", WRONG)
def test_what_looks_along_a_split_dim_is_refused(name):
    what, found, hint = WRONG[name]
    P = Partition([1, 1, 2, 1])
    net = distribute(nn.Sequential(nn.ReLU(), Does(what)), P, custom="recurse")
    x = torch.randn(2, 2, 8, 6)[P.local_slices((2, 2, 8, 6))]
    told = rf"forward of 1 \(Does\)[\s\S]*({found})[\s\S]*HINT: [\s\S]*{hint}"
    for _ in range(2):  # an error leaves nothing behind
        with pytest.raises(PartitionError, match=told):
            net(x)
    assert torch.rand(2, 2).mean() >= 0, "torch's functions are as they were"
    assert not torch.overrides._get_current_function_mode_stack()


def rest(m, x):
    """Use every kind of function that is right on own blocks."""
    y = x.permute(0, 2, 3, 1)  # channels last
    y = F.layer_norm(y, (2,)) @ m.square.T + F.linear(y, m.square, m.shift.view(2))
    y = torch.einsum("nhwc,cd->nhwd", y, m.square).movedim(-1, 1)
    a, b = y.chunk(2, dim=1)
    y = torch.cat([a * b.sigmoid(), b[:, [0]].expand_as(a)], 1)
    y = torch.stack([y, x], 2).view(x.shape[0], 4, *x.shape[2:]).unflatten(1, (2, 2)).sum(2)
    y = y.mT.unsqueeze(1).squeeze(1).transpose(2, 3) * m.scale
    y = torch.where(y > 0, y, 0.1 * y).clamp(max=3).masked_fill(x > 2, 0.5)
    y[:, 1] += 2 - x[:, 0] ** 2
    y /= y.detach().abs().add_(1).to(y.dtype)
    y = y + F.softmax(x, 1) * y.mean(1, keepdim=True) + F.normalize(y) + m.shift
    y = F.dropout(y, 0.5, training=False) + torch.zeros_like(x) + y.max(1, keepdim=True)[0]
    return Twice.apply(y.contiguous()) + m.relu(m.conv(m.conv(y))) + F.pad(y, (1, -1))


RIGHT = {
    "one by one": rest,
    "autocast": lambda m, x: torch.autocast("cpu", torch.bfloat16)(
        lambda: m.conv(x) * m.scale
    )().to(x.dtype),
    "checkpointed": lambda m, x: x + checkpoint(rest, m, x, use_reentrant=False),
    "no_grad": lambda m, x: x + torch.no_grad()(lambda: rest(m, x))(),
}


@pytest.mark.ranks(2, timeout=90)
@pytest.mark.parametrize("name", RIGHT)
def test_what_keeps_points_apart_gives_the_numbers_of_one_process(name):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), Does(RIGHT[name])).double()
    x = torch.randn(3, 2, 5, 6, dtype=torch.float64)  # blocks of 3 and 2 rows
    close = {"atol": 0.05, "rtol": 0.05} if name == "autocast" else {}
    for grid in ([1, 1, 2, 1], [2, 1, 1, 1]):
        P = Partition(grid)
        made = distribute(plain, P, custom="recurse")
        for net in (made, copy.deepcopy(made)):
            where = P.local_slices(x.shape)
            own, whole = x[where].clone().requires_grad_(), x.clone().requires_grad_()
            y, z = net(own), plain(whole)
            torch.testing.assert_close(y, z[where], **close)
            probe = torch.linspace(-1, 1, z.numel(), dtype=z.dtype).view(z.shape)
            (y * probe[where]).sum().backward()
            plain.zero_grad()
            (z * probe).sum().backward()
            torch.testing.assert_close(own.grad, whole.grad[where], **close)
            for (key, p), q in zip(net.named_parameters(), plain.parameters(), strict=True):
                ours, theirs = (torch.zeros_like(v) if v.grad is None else v.grad for v in (p, q))
                told = f"{key} on {grid}"
                torch.testing.assert_close(ours, theirs, msg=lambda m, t=told: f"{t}: {m}", **close)


class Cell(nn.Module):
    """Keeps a state between calls."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        self.state = None

    def forward(self, x):
        """Return the new state."""
        before = torch.zeros_like(x) if self.state is None else self.state
        self.state = torch.tanh(self.conv(x) + before)
        return self.state


class Lines(nn.Module):
    """Looks along the height where that is whole."""

    def __init__(self, there, back):
        super().__init__()
        self.there = there
        self.back = back

    def forward(self, x):
        """Return the same waves, shifted."""
        waves = torch.fft.fft(self.there(x), dim=2)
        return self.back(torch.fft.ifft(2 * waves, dim=2).real)


@pytest.mark.ranks(2)
def test_states_between_calls_and_layers_that_move_the_split_are_followed():
    P, Q = Partition([1, 1, 2, 1]), Partition([1, 1, 1, 2])
    torch.manual_seed(1)
    x = torch.randn(1, 2, 5, 6)
    where = P.local_slices(x.shape)
    plain = Cell()
    net = distribute(plain, P, custom="recurse")
    for _ in range(3):
        torch.testing.assert_close(net(x[where]), plain(x)[where])
    lines = Lines(Repartition(P, Q), Repartition(Q, P))
    torch.testing.assert_close(distribute(lines, P, custom="recurse")(x[where]), 2 * x[where])
    with pytest.raises(PartitionError, match=r"fft[\s\S]*dim 2"):
        distribute(Lines(nn.Identity(), nn.Identity()), P, custom="recurse")(x[where])


def centre(m, x):
    """Do what is right on whole samples."""
    return x - x.mean((2, 3), keepdim=True)


@pytest.mark.ranks(2)
def test_samples_that_are_split_are_looked_at_whole():
    torch.manual_seed(2)
    x, P = torch.randn(3, 2, 6, 6), Partition([2, 1, 1, 1])
    where = P.local_slices(x.shape)
    for what in (centre, attention, lambda m, x: F.interpolate(x, scale_factor=2)):
        plain = Does(what)
        net = distribute(plain, P, custom="recurse")
        torch.testing.assert_close(net(x[where]), plain(x)[where[:1]])
    for wrong in (
        lambda m, x: x - x.mean(0),
        lambda m, x: F.conv2d(x[:, 0], torch.ones(1, x.shape[0], 1, 1)),  # samples as channels
        lambda m, x: F.conv2d(x, x[:, :, :3, :3]),  # a weight of each sample
        lambda m, x: torch.einsum("nchw,mchw->nm", x, x),
    ):
        with pytest.raises(PartitionError, match=r"the module \(Does\)[\s\S]*dim 0"):
            distribute(Does(wrong), P, custom="recurse")(x[where])


@pytest.mark.parametrize("what", [centre, attention])
def test_one_rank_splits_nothing_and_may_do_anything(what):
    x, plain = torch.randn(3, 2, 6, 6), Does(what)
    net = distribute(plain, Partition([1, 1, 1, 1]), custom="recurse")
    torch.testing.assert_close(net(x), plain(x))


def test_the_report_refuses_what_the_network_would():
    net = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), Does(WRONG["mean"][0]))
    with pytest.raises(PartitionError, match=r"forward of 1 \(Does\): mean[\s\S]*dim 2"):
        plan_report(net, (2, 2, 8, 6), Partition([1, 1, 2, 1]))
    told = plan_report(nn.Sequential(net[0], Does(rest)), (2, 2, 8, 6), Partition([1, 1, 2, 1]))
    assert told.count("Conv2d") == 3, "one layer is called twice"


@pytest.mark.ranks(2)
def test_a_followed_network_is_pickled_and_interrupted():
    P = Partition([1, 1, 2, 1])
    net = distribute(Cell(), P, custom="recurse")
    again = pickle.loads(cloudpickle.dumps(net))
    x = torch.randn(1, 2, 4, 4)
    torch.testing.assert_close(again(x), net(x))

    def stop(*_):
        raise KeyboardInterrupt

    handle = net.conv.register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        net(x)
    handle.remove()
    assert not torch.overrides._get_current_function_mode_stack()
    net.state = None
    net(x)
    assert unisono.world().size == 2
