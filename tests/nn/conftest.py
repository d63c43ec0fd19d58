"""What the proofs of the layers share: blocks of any cuts, and one comparison with torch.

Handed to tests as the fixture `proof`, since test modules do not import each other.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

import unisono
import unisono.nn as unn
from unisono.topology import Partition
from unisono.topology.decompose import split_cuts


def drawn(*shape, dtype=torch.float64, seed=1):
    """Return the same tensor on every rank."""
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def cuts_of(shape, grid, seed=0):
    """Return cuts of each dim: balanced for seed 0, else any, with empty blocks too."""
    if seed == 0:
        return tuple(split_cuts(n, parts) for n, parts in zip(shape, grid, strict=True))
    rng = random.Random(seed)
    return tuple(
        (0, *sorted(rng.randint(0, n) for _ in range(parts - 1)), n)
        for n, parts in zip(shape, grid, strict=True)
    )


def own_slices(partition, cuts):
    """Return where this rank's block lies; None outside of the partition."""
    if not partition.active:
        return None
    return tuple(slice(own[i], own[i + 1]) for own, i in zip(cuts, partition.index, strict=True))


def ramp(like, seed=7):
    """Return weights for the elements of a tensor, real and the same on every rank."""
    real = torch.empty(0, dtype=like.dtype).real.dtype if like.is_complex() else like.dtype
    return torch.linspace(-1, 1, like.numel(), dtype=real).roll(seed).reshape(like.shape)


def score(y, weights=None):
    """Return a real number that depends on `y` twice."""
    squares = (y * y.conj()).real + y.real
    return (squares if weights is None else squares * weights).sum()


def compare(layer, plain, x, P_x, P_y=None, *, seed=0, cuts=None, twice=True, **close):
    """Compare values, first and second derivatives of a layer on blocks with torch on the whole.

    `seed` chooses the cuts of the input; `P_y` is where the output lies, in balanced blocks, or
    None for the cuts of the input.
    """
    cuts = cuts_of(x.shape, P_x.shape, seed) if cuts is None else cuts
    where = own_slices(P_x, cuts)
    own = x.new_empty(x.shape[0], 0) if where is None else x[where].clone()
    before = own.clone()
    own.requires_grad_()
    whole = x.clone().requires_grad_()
    y, z = layer(own), plain(whole)
    target = P_x if P_y is None else P_y
    there = None
    if target.active:
        there = where if P_y is None else P_y.local_slices(z.shape)
        torch.testing.assert_close(y, z[there], **close)
    else:
        assert y.numel() == 0
        assert y.dtype == z.dtype or not layer._takes_part

    own_params, params = list(layer.parameters()), dict(plain.named_parameters())
    names = [name for name, _ in layer.named_parameters()]
    weights = ramp(z)
    found = torch.autograd.grad(
        score(y, None if there is None else weights[there]), [own, *own_params],
        create_graph=twice, allow_unused=True,
    )  # fmt: skip
    wanted = torch.autograd.grad(
        score(z, weights), [whole, *params.values()], create_graph=twice, allow_unused=True
    )
    expected = dict(zip(params, wanted[1:], strict=True))
    if where is not None:
        torch.testing.assert_close(found[0], wanted[0][where], **close)
    for name, grad in zip(names, found[1:], strict=True):
        _compare_parameter(layer, name, grad, expected[name], close)
    assert torch.equal(own.detach(), before), "the input was changed"
    if not twice:
        return
    again = ramp(x, 3)
    score(found[0], None if where is None else again[where]).backward()
    score(wanted[0], again).backward()
    if where is not None:
        torch.testing.assert_close(own.grad, whole.grad[where], **close)
    for name, p in layer.named_parameters():
        _compare_parameter(layer, name, p.grad, params[name].grad, close)


def _compare_parameter(layer, name, grad, expected, close):
    holding = layer._holdings[name]
    if 0 in holding.shape or expected is None:
        return
    mine = torch.zeros_like(expected[holding.slices]) if grad is None else grad
    torch.testing.assert_close(mine, expected[holding.slices], **close)


def pair(make, plain):
    """Build both with one seed and check that they hold the same weights."""
    torch.manual_seed(11)
    theirs = plain()
    torch.manual_seed(11)
    ours = make()
    for name, value in ours.state_dict().items():
        assert torch.equal(value, theirs.state_dict()[name]), name
    return ours, theirs


class Case:
    """A layer, torch's counterpart, and whole inputs with the way each is cut."""

    def __init__(self, name, build, plain, inputs, parts, P_y):
        self.name = name
        self.build = build
        self.plain = plain
        self.inputs = inputs
        self.parts = parts
        self.P_y = P_y

    def own_inputs(self):
        """Return this rank's blocks; without elements outside."""
        return [
            x.new_empty(x.shape[0], 0) if not part.active else x[_slices(part, x)].clone()
            for x, part in zip(self.inputs, self.parts, strict=True)
        ]

    def check(self):
        """Compare values and gradients with torch's; return the layer."""
        ours, theirs = pair(self.build, self.plain)
        own = [x.requires_grad_(x.is_floating_point()) for x in self.own_inputs()]
        whole = [x.clone().requires_grad_(x.is_floating_point()) for x in self.inputs]
        y, z = ours(*own), theirs(*whole)
        there = ...
        if self.P_y.active:
            there = _slices(self.P_y, z) if z.dim() else ...
            torch.testing.assert_close(y, z[there], msg=lambda m: f"{self.name}: {m}")
        else:
            assert y.numel() == 0 or y.dim() == 0, self.name
        assert y.requires_grad
        weights = ramp(z)
        score(y, weights[there] if self.P_y.active else None).backward()
        score(z, weights).backward()
        for mine, other, part in zip(own, whole, self.parts, strict=True):
            if other.grad is not None and part.active:
                torch.testing.assert_close(
                    mine.grad, other.grad[_slices(part, other)], msg=lambda m: f"{self.name}: {m}"
                )
        expected = dict(theirs.named_parameters())
        for name, p in ours.named_parameters():
            _compare_parameter(ours, name, p.grad, expected[name].grad, {})
        return ours


def _slices(part, x):
    """Return the own block of a tensor; dims that the partition does not have are whole."""
    return part.local_slices(x.shape[: part.dim])


def zoo(ranks=None, dtype=torch.float64):
    """Return a case for every kind of layer on these ranks of the world (default: all)."""
    ranks = tuple(range(unisono.world().size)) if ranks is None else tuple(ranks)
    n = len(ranks)

    def P(*shape):
        return Partition(shape, ranks=ranks[: torch.Size(shape).numel()])

    kw = {"dtype": dtype}
    lines, batch, channels, first = P(1, 1, n), P(n, 1, 1), P(1, n, 1), P(1, 1, 1)
    rows, flat, one = P(1, 1, n, 1), P(1, n), P(1, 1)
    image, line, table = (
        drawn(2, 2, 9, 4, dtype=dtype), drawn(3, 4, 9, dtype=dtype), drawn(5, 7, dtype=dtype)
    )  # fmt: skip
    ids = torch.tensor([[0, 5, 2, 2], [6, 1, 0, 3], [3, 3, 3, 6]])
    labels = ids[:, :1].expand(3, 9).contiguous() % 4
    conv = {"kernel_size": 3, "padding": 1, **kw}
    wide = {"kernel_size": 5, "padding": 2, "stride": 2, **kw}

    def case(name, build, plain, x, part, P_y=None):
        return Case(name, build, plain, [x], [part], P_y or part)

    return [
        case("FeatureConv2d", lambda: unn.DistributedFeatureConv2d(rows, 2, 3, **conv),
             lambda: nn.Conv2d(2, 3, **conv), image, rows),
        case("FeatureConv1d root", lambda: unn.DistributedFeatureConv1d(
             lines, 4, 3, **wide, weights="root"), lambda: nn.Conv1d(4, 3, **wide), line, lines),
        case("GeneralConv2d in space", lambda: unn.DistributedGeneralConv2d(
             rows, rows, rows, 2, 3, **conv), lambda: nn.Conv2d(2, 3, **conv), image, rows),
        case("ChannelConv1d", lambda: unn.DistributedChannelConv1d(
             channels, first, P(1, n, 1), 4, 3, **conv), lambda: nn.Conv1d(4, 3, **conv), line,
             channels, first),
        case("GeneralConv1d with groups", lambda: unn.DistributedGeneralConv1d(
             first, channels, P(n, 1, 1), 4, 4, groups=4, **conv),
             lambda: nn.Conv1d(4, 4, groups=4, **conv), line, first, channels),
        case("ConvTranspose1d", lambda: unn.DistributedFeatureConvTranspose1d(
             lines, 4, 2, 3, stride=2, **kw), lambda: nn.ConvTranspose1d(4, 2, 3, stride=2, **kw),
             line, lines),
        case("MaxPool2d", lambda: unn.DistributedMaxPool2d(rows, 2), lambda: nn.MaxPool2d(2),
             image, rows),
        case("AvgPool1d", lambda: unn.DistributedAvgPool1d(lines, 3, 2, 1),
             lambda: nn.AvgPool1d(3, 2, 1), line, lines),
        case("Upsample", lambda: unn.DistributedUpsample(lines, scale_factor=2, mode="linear"),
             lambda: nn.Upsample(scale_factor=2, mode="linear"), line, lines),
        case("BatchNorm", lambda: unn.DistributedBatchNorm(batch, 4, **kw),
             lambda: nn.BatchNorm1d(4, **kw), line, batch),
        case("LayerNorm", lambda: unn.DistributedLayerNorm(lines, 9, **kw),
             lambda: nn.LayerNorm(9, **kw), line, lines),
        case("GroupNorm", lambda: unn.DistributedGroupNorm(lines, 2, 4, **kw),
             lambda: nn.GroupNorm(2, 4, **kw), line, lines),
        case("InstanceNorm", lambda: unn.DistributedInstanceNorm(lines, 4, affine=True, **kw),
             lambda: nn.InstanceNorm1d(4, affine=True, **kw), line, lines),
        case("Linear", lambda: unn.DistributedLinear(flat, one, P(1, n), 7, 6, **kw),
             lambda: nn.Linear(7, 6, **kw), table, flat, one),
        case("LinearAllGather", lambda: unn.DistributedLinearAllGather(flat, 7, 6, **kw),
             lambda: nn.Linear(7, 6, **kw), table, flat),
        case("LinearReduceScatter", lambda: unn.DistributedLinearReduceScatter(flat, 7, 6, **kw),
             lambda: nn.Linear(7, 6, **kw), table, flat),
        case("Pad", lambda: unn.DistributedPad(lines, (2, 1), "reflect", balance=True),
             lambda: nn.ReflectionPad1d((2, 1)), line, lines),
        case("HaloExchange", lambda: unn.HaloExchange(first, (3,), padding=1, fill=0.5),
             lambda: nn.ConstantPad1d(1, 0.5), line, first),
        case("Repartition", lambda: unn.Repartition(lines, channels), nn.Identity, line, lines,
             channels),
        Case("Embedding", lambda: unn.DistributedEmbedding(lines, 7, 5, **kw),
             lambda: nn.Embedding(7, 5, **kw), [ids], [_All(ranks)], lines),
        Case("MSELoss", lambda: unn.DistributedMSELoss(lines), nn.MSELoss, [line, line.flip(0)],
             [lines, lines], lines),
        Case("CrossEntropyLoss", lambda: unn.DistributedCrossEntropyLoss(channels),
             nn.CrossEntropyLoss, [line, labels], [channels, _All(ranks)], channels),
    ]  # fmt: skip


class _All:
    """Stands for a tensor that some ranks hold whole."""

    dim = 0

    def __init__(self, ranks):
        self.active = unisono.world().rank in ranks

    def local_slices(self, shape):
        return ()


class Proof:
    """The functions above, as one fixture."""

    drawn = staticmethod(drawn)
    cuts_of = staticmethod(cuts_of)
    own_slices = staticmethod(own_slices)
    ramp = staticmethod(ramp)
    score = staticmethod(score)
    compare = staticmethod(compare)
    pair = staticmethod(pair)
    zoo = staticmethod(zoo)


@pytest.fixture(scope="session")
def proof():
    return Proof()
