"""Split linear layers against torch's."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F

import unisono
from unisono import nn as linear
from unisono.topology import Partition

DOUBLE = {"dtype": torch.float64}
WEIGHTS = ("replicated", "root")


def compare(proof, make, P_x, P_y, x, outs, bias=True, **how):
    """Compare a layer with torch's of as many features."""
    ours, theirs = proof.pair(make, lambda: nn.Linear(x.shape[-1], outs, bias, **DOUBLE))
    proof.compare(ours, theirs, x, P_x, P_y, **how)


@pytest.mark.ranks([1, 2, 4], backend=["gloo", "shm"])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_the_grid_of_weight_blocks_equals_torch(weights, proof):
    size = unisono.world().size
    for batch, outs, ins in ((1, 1, size), (1, size, 1), (size, 1, 1), (1, 2, 2), (2, 1, 2)):
        if batch * outs * ins > size:
            continue
        P_x, P_y = Partition([batch, ins]), Partition([batch, outs])
        P = P_x, P_y, Partition([outs, ins] if batch == 1 else [batch, outs, ins])
        make = lambda P=P: linear.DistributedLinear(*P, 7, 6, **DOUBLE, weights=weights)  # noqa: E731
        compare(proof, make, P_x, P_y, proof.drawn(5, 7), 6)
        cuts = (P_x.cuts((5, 7))[0], tuple([0] * ins + [7]))  # balanced on the way
        compare(proof, make, P_x, P_y, proof.drawn(5, 7), 6, cuts=cuts)


@pytest.mark.ranks([2, 3, 4], backend=["gloo", "shm"])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_column_and_row_parallel_layers_equal_torch(weights, proof):
    size = unisono.world().size
    batch = 2 if size == 4 else 1
    P, Q = Partition([batch, 1, size // batch]), Partition([batch, size // batch, 1])
    x, kw = proof.drawn(5, 6, 7), {**DOUBLE, "weights": weights}
    columns, rows = linear.DistributedLinearAllGather, linear.DistributedLinearReduceScatter
    for kind in (columns, rows):
        compare(proof, lambda k=kind: k(P, 7, 5, **kw), P, P, x, 5)
    compare(proof, lambda: columns(P, 7, 5, P_x=Q, **kw), Q, P, x, 5)
    for bias in (True, False):
        compare(proof, lambda b=bias: rows(P, 7, 5, b, P_y=Q, **kw), P, Q, x, 5, bias)


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
def test_columns_then_rows_equal_the_sequential_network(proof):
    P = Partition([1, 2])
    x = proof.drawn(4, 6)
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


@pytest.mark.ranks(2, backend=["gloo", "shm"])
def test_tangents_travel_as_values_do(proof):
    P = Partition([1, 2])
    x, t = proof.drawn(3, 6), proof.drawn(6, 3).T
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
    loss, target, here = linear.DistributedMSELoss(P), x.flip(0) + 1, P.local_slices((3, 6))
    with forward_ad.dual_level():
        y = loss(forward_ad.make_dual(x[here].contiguous(), t[here].contiguous()), target[here])
        z = F.mse_loss(forward_ad.make_dual(x, t.contiguous()), target)
        torch.testing.assert_close(
            forward_ad.unpack_dual(y).tangent, forward_ad.unpack_dual(z).tangent
        )
