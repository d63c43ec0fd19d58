"""Split linear layers against torch's."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F

import unisono
from unisono import nn as linear
from unisono.errors import PartitionError
from unisono.topology import Partition


def drawn(*shape):
    """Return the same float64 tensor on every rank."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def compare(make, P_x, P_y, x, features, *, slices_x=None, bias=True):
    """Run both with one seed; compare values and all gradients."""
    torch.manual_seed(5)
    expected = nn.Linear(*features, bias=bias, dtype=x.dtype)
    torch.manual_seed(5)
    layer = make()
    for name, value in layer.state_dict().items():
        assert torch.equal(value, expected.state_dict()[name]), name
    where = slices_x or (P_x.local_slices(x.shape) if P_x.active else None)
    own = x[where].clone() if where is not None else x.new_empty(x.shape[0], 0)
    own.requires_grad_()
    whole = x.clone().requires_grad_()
    y, z = layer(own), expected(whole)
    probe = torch.linspace(-1, 1, z.numel(), dtype=x.dtype).reshape(z.shape)
    if P_y.active:
        here = P_y.local_slices(z.shape)
        torch.testing.assert_close(y, z[here])
        (y * probe[here]).sum().backward()
    else:
        y.sum().backward()
    (z * probe).sum().backward()
    if where is not None:
        torch.testing.assert_close(own.grad, whole.grad[where])
    for name, holding in layer._holdings.items():
        if 0 not in holding.shape:
            mine = getattr(layer, name).grad
            torch.testing.assert_close(mine, getattr(expected, name).grad[holding.slices])


@pytest.mark.ranks([1, 2, 4], backend=["gloo", "shm"])
@pytest.mark.parametrize("weights", ["replicated", "root"])
def test_the_grid_of_weight_blocks_equals_torch(weights):
    size = unisono.world().size
    x = drawn(5, 7)
    for batch, outs, ins in ((1, 1, size), (1, size, 1), (size, 1, 1), (1, 2, 2), (2, 1, 2)):
        if batch * outs * ins > size:
            continue
        P_x, P_y = Partition([batch, ins]), Partition([batch, outs])
        P_w = Partition([outs, ins] if batch == 1 else [batch, outs, ins])
        compare(
            lambda P=(P_x, P_y, P_w): linear.DistributedLinear(
                *P, 7, 6, dtype=x.dtype, weights=weights
            ),
            P_x,
            P_y,
            x,
            (7, 6),
        )


@pytest.mark.ranks(2)
def test_unbalanced_features_are_balanced_on_the_way():
    P = Partition([1, 2])
    cut = slice(0, 6) if P.root.rank == 0 else slice(6, 7)
    one = Partition([1, 1])
    compare(
        lambda: linear.DistributedLinear(P, one, Partition([1, 2]), 7, 4, dtype=torch.float64),
        P, one, drawn(3, 7), (7, 4), slices_x=(slice(None), cut),
    )  # fmt: skip


@pytest.mark.ranks([2, 3], backend=["gloo", "shm"])
def test_column_and_row_parallel_layers_equal_torch():
    size = unisono.world().size
    P = Partition([1, 1, size])
    Q = Partition([1, size, 1])
    x = drawn(2, 6, 7)
    kinds = linear.DistributedLinearAllGather, linear.DistributedLinearReduceScatter
    for weights in ("replicated", "root"):
        kw = {"dtype": x.dtype, "weights": weights}
        for kind in kinds:
            compare(lambda k=kind, kw=kw: k(P, 7, 5, **kw), P, P, x, (7, 5))
        compare(lambda kw=kw: kinds[0](P, 7, 5, P_x=Q, **kw), Q, P, x, (7, 5))
        compare(lambda kw=kw: kinds[1](P, 7, 5, P_y=Q, **kw), P, Q, x, (7, 5))


@pytest.mark.ranks(4)
def test_batch_and_features_split_together():
    P, Q = Partition([2, 1, 2]), Partition([2, 2, 1])
    x = drawn(5, 3, 6)
    columns, rows = linear.DistributedLinearAllGather, linear.DistributedLinearReduceScatter
    for weights in ("replicated", "root"):
        kw = {"dtype": x.dtype, "weights": weights}
        for kind in (columns, rows):
            compare(lambda k=kind, kw=kw: k(P, 6, 3, **kw), P, P, x, (6, 3))
        compare(lambda kw=kw: columns(P, 6, 3, P_x=Q, **kw), Q, P, x, (6, 3))
        compare(lambda kw=kw: rows(P, 6, 3, P_y=Q, **kw), P, Q, x, (6, 3))
        compare(lambda kw=kw: rows(P, 6, 3, bias=False, P_y=Q, **kw), P, Q, x, (6, 3), bias=False)


@pytest.mark.ranks(4)
def test_weights_on_the_root_live_on_the_first_rank_that_uses_a_block():
    P, Q = Partition([2, 1, 2]), Partition([2, 2, 1])
    columns = linear.DistributedLinearAllGather(P, 6, 4, weights="root")
    rows = linear.DistributedLinearReduceScatter(P, 4, 3, P_y=Q, weights="root")
    is_first = P.index[0] == 0
    assert columns.weight.shape == ((2, 6) if is_first else (0, 0))
    assert columns.bias.shape == ((2,) if is_first else (0,))
    assert rows.weight.shape == ((3, 2) if is_first else (0, 0))
    assert rows.bias.shape == ((3,) if P.rank == 0 else (0,))  # every rank adds all of it
    rows(columns(torch.ones(1, 2, 3))).sum().backward()
    for p in (*columns.parameters(), *rows.parameters()):
        assert p.grad.shape == p.shape


@pytest.mark.ranks(2)
def test_columns_then_rows_equal_the_sequential_network():
    P = Partition([1, 2])
    x = drawn(4, 6)
    torch.manual_seed(0)
    first, second = nn.Linear(6, 9).double(), nn.Linear(9, 4).double()
    torch.manual_seed(0)
    ours = (
        linear.DistributedLinearAllGather(P, 6, 9),
        linear.DistributedLinearReduceScatter(P, 9, 4),
    )
    for layer, plain in zip(ours, (first, second), strict=True):
        layer.double().load_state_dict(plain.state_dict())
    own = x[P.local_slices(x.shape)]
    y = ours[1](F.gelu(ours[0](own)))
    z = second(F.gelu(first(x)))
    torch.testing.assert_close(y, z[P.local_slices(z.shape)])


def test_partitions_that_do_not_fit_are_refused():
    one = Partition([1, 1])
    with pytest.raises(PartitionError, match="P_w must be"):
        linear.DistributedLinear(one, one, Partition([1]), 3, 3)
    with pytest.raises(PartitionError, match="< 1"):
        linear.DistributedLinearAllGather(one, 0, 3)
    with pytest.raises(PartitionError, match="3 features != 4"):
        linear.DistributedLinearAllGather(one, 4, 3)(torch.ones(2, 3))


@pytest.mark.ranks(2, backend=["gloo", "shm"])
def test_tangents_travel_as_values_do():
    P = Partition([1, 2])
    x, t = drawn(3, 6), drawn(6, 3).T
    expected = nn.Linear(6, 4, bias=False, dtype=x.dtype)
    for kind in (linear.DistributedLinearAllGather, linear.DistributedLinearReduceScatter):
        layer = kind(P, 6, 4, bias=False, dtype=x.dtype)
        layer.load_state_dict(expected.state_dict())
        here = P.local_slices(x.shape)
        with forward_ad.dual_level():
            y = layer(forward_ad.make_dual(x[here], t[here].contiguous()))
            value, tangent = forward_ad.unpack_dual(y)
            there = P.local_slices((3, 4))
            torch.testing.assert_close(value, expected(x)[there])
            torch.testing.assert_close(tangent, expected(t)[there])
    layer = unisono.nn.AllSumReduce(P, axes_reduce=(0, 1))
    with forward_ad.dual_level():
        y = layer(forward_ad.make_dual(x, t.contiguous()))
        torch.testing.assert_close(forward_ad.unpack_dual(y).tangent, 2 * t)
    loss, target, here = unisono.nn.DistributedMSELoss(P), drawn(3, 6) + 1, P.local_slices((3, 6))
    with forward_ad.dual_level():
        y = loss(forward_ad.make_dual(x[here].contiguous(), t[here].contiguous()), target[here])
        z = F.mse_loss(forward_ad.make_dual(x, t.contiguous()), target)
        torch.testing.assert_close(
            forward_ad.unpack_dual(y).tangent, forward_ad.unpack_dual(z).tangent
        )
