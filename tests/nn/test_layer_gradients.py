"""Gradients: of any memory layout, on ranks without points, clipped, under data parallelism."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import unisono
import unisono.nn as unn
from unisono.data_parallel import DataParallel
from unisono.nn import (
    DistributedLinearAllGather,
    DistributedLinearReduceScatter,
    check_replicas,
    clip_grad_norm_,
    full_state_dict,
    split,
)
from unisono.topology import Mesh, Partition


def block(x, P):
    """Return the own block of a whole tensor; without elements outside of the partition."""
    if not P.active:
        return x.new_empty(x.shape[0], 0)
    return x[P.local_slices(x.shape)].clone()


@pytest.mark.ranks(2)
def test_any_memory_layout_of_inputs_and_gradients_gives_right_values(proof):
    P = Partition([1, 1, 2, 1])
    conv = nn.Conv2d(4, 8, 3, padding=1, dtype=torch.float64)
    plain = nn.Sequential(conv, nn.MaxPool2d(3, 1, 1), nn.Conv2d(8, 2, 1).double())
    net = nn.Sequential(
        first := unn.DistributedFeatureConv2d(P, 4, 8, 3, padding=1, dtype=torch.float64),
        unn.DistributedMaxPool2d(P, 3, 1, 1),
        unn.DistributedFeatureConv2d(P, 8, 2, 1, dtype=torch.float64),
    )
    net.load_state_dict(plain.state_dict())
    x = proof.drawn(2, 4, 6, 5)
    where = P.local_slices(x.shape)
    shapes = {
        "transposed": (x.transpose(2, 3).contiguous().transpose(2, 3), x),
        "expanded": (x[:1].expand(2, -1, -1, -1), x[:1].expand(2, -1, -1, -1)),
        "strided": (x.repeat_interleave(2, 3)[..., ::2], x),
        "channels last": (x.contiguous(memory_format=torch.channels_last), x),
    }
    for name, (given, whole) in shapes.items():
        own = given[where].detach().requires_grad_()
        z_in = whole.clone().requires_grad_()
        y, z = net(own), plain(z_in)
        torch.testing.assert_close(y, z[P.local_slices(z.shape)], msg=name)
        weights = proof.ramp(z).transpose(2, 3).contiguous().transpose(2, 3)
        y.backward(weights[P.local_slices(z.shape)])  # a gradient that is not contiguous
        z.backward(weights)
        torch.testing.assert_close(own.grad, z_in.grad[where], msg=name)
    last = block(x, P).contiguous(memory_format=torch.channels_last)
    for layer in (
        first,
        unn.DistributedMaxPool2d(P, 3, 1, 1),
        unn.DistributedAvgPool2d(P, 3, 1, 1),
        unn.HaloExchange(P, (3, 3)),
    ):
        y = layer(last)
        assert y.is_contiguous(memory_format=torch.channels_last), type(layer).__name__
    small = torch.ones(1, dtype=torch.float64).expand(3, 4)  # stride 0
    rows = Partition([2, 1])
    assert unn.AllGather(rows, 0)(small).shape == (6, 4)
    assert torch.equal(unn.Repartition(rows, Partition([1, 2]))(small), torch.ones(6, 2).double())


@pytest.mark.ranks(2)
def test_nothing_is_written_in_place_and_autograd_does_not_complain(proof):
    P = Partition([1, 1, 2])
    for kernel, padding in ((1, 0), (3, 1)):
        for before in (nn.Identity(), nn.ReLU(), nn.Sigmoid()):
            torch.manual_seed(0)
            conv = nn.Conv1d(2, 2, kernel, padding=padding, dtype=torch.float64)
            plain = nn.Sequential(before, conv, nn.ReLU(inplace=True), nn.MaxPool1d(1), before)
            net = unn.split(copy.deepcopy(plain), P, blocks=True)
            x = proof.drawn(2, 2, 7)
            own, whole = block(x, P).requires_grad_(), x.clone().requires_grad_()
            kept = own.detach().clone()
            proof.score(net(own)).backward()
            proof.score(plain(whole)).backward()
            assert torch.equal(own.detach(), kept)
            torch.testing.assert_close(own.grad, whole.grad[P.local_slices(x.shape)])
    leaf = torch.ones(1, 2, 4, requires_grad=True)
    same = unn.DistributedMaxPool1d(P, 1)(leaf)
    assert same is not leaf
    one = Partition([1, 1, 1], ranks=[unisono.world().rank], comm=unisono.world())
    for layer in (
        unn.Repartition(one, one),
        unn.HaloExchange(one, (1,)),
        unn.DistributedPad(one, (0, 0)),
    ):
        assert layer(leaf) is not leaf  # an in-place step on the result must not hit a leaf


@pytest.mark.ranks(2)
def test_each_backward_uses_the_plan_of_its_own_forward(proof):
    P = Partition([1, 1, 2])
    conv = nn.Conv1d(2, 3, 3, padding=1, dtype=torch.float64)
    layer = unn.DistributedFeatureConv1d(P, 2, 3, 3, padding=1, dtype=torch.float64)
    conv.load_state_dict(layer.state_dict())
    pairs = []
    for length in (9, 12, 5):
        x = proof.drawn(1, 2, length)
        own, whole = block(x, P).requires_grad_(), x.clone().requires_grad_()
        pairs.append((own, whole, proof.score(layer(own)), proof.score(conv(whole))))
    for own, whole, y, z in reversed(pairs):
        y.backward()
        z.backward()
        torch.testing.assert_close(own.grad, whole.grad[P.local_slices(whole.shape)])
    torch.testing.assert_close(layer.weight.grad, conv.weight.grad)


KW = {"dtype": torch.float64}


PAIRS = {
    "convolution": (
        lambda P, w: unn.DistributedFeatureConv1d(P, 2, 3, 1, **KW, weights=w),
        lambda: nn.Conv1d(2, 3, 1, **KW),
    ),
    "transposed convolution": (
        lambda P, w: unn.DistributedFeatureConvTranspose1d(P, 2, 3, 1, **KW, weights=w),
        lambda: nn.ConvTranspose1d(2, 3, 1, **KW),
    ),
    "batch norm": (
        lambda P, w: unn.DistributedBatchNorm(P, 2, **KW, weights=w),
        lambda: nn.BatchNorm1d(2, **KW),
    ),
    "batch norm in eval": (
        lambda P, w: unn.DistributedBatchNorm(P, 2, **KW, weights=w).eval(),
        lambda: nn.BatchNorm1d(2, **KW).eval(),
    ),
    "group norm": (
        lambda P, w: unn.DistributedGroupNorm(P, 1, 2, **KW, weights=w),
        lambda: nn.GroupNorm(1, 2, **KW),
    ),
    "instance norm": (
        lambda P, w: unn.DistributedInstanceNorm(P, 2, affine=True, **KW, weights=w),
        lambda: nn.InstanceNorm1d(2, affine=True, **KW),
    ),
    "layer norm": (
        lambda P, w: unn.DistributedLayerNorm(P, (2, 2), **KW, weights=w),
        lambda: nn.LayerNorm((2, 2), **KW),
    ),
}


@pytest.mark.ranks(3)
def test_second_derivatives_of_a_plain_sum_meet_ranks_without_points():
    """The first gradient then depends on the weight alone, which an empty share must know too."""
    P = Partition([1, 1, 3])
    x = torch.randn(2, 2, 2, **KW, generator=torch.Generator().manual_seed(1))
    where = P.local_slices(x.shape)
    for name, (build, make) in PAIRS.items():
        for weights in ("replicated", "root"):
            torch.manual_seed(4)
            plain = make()
            torch.manual_seed(4)
            layer = build(P, weights)
            own, whole = x[where].clone().requires_grad_(), x.clone().requires_grad_()
            (mine,) = torch.autograd.grad(layer(own).sum(), own, create_graph=True)
            (theirs,) = torch.autograd.grad(plain(whole).sum(), whole, create_graph=True)
            torch.testing.assert_close(mine, theirs[where])
            assert mine.requires_grad == theirs.requires_grad, name
            mine.square().sum().backward()
            theirs.square().sum().backward()
            for key, p in plain.named_parameters():
                holding, got = layer._holdings[key], layer.get_parameter(key).grad
                if p.grad is None:
                    assert got is None or not got.any(), name
                elif 0 not in holding.shape:
                    torch.testing.assert_close(got, p.grad[holding.slices])


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
