"""Linear layers split in features, batch and weights, against torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.nn.drawing import RANKS, quick
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F

import unisono
import unisono.nn as unn
from unisono.topology import Partition


@pytest.mark.ranks(RANKS)
@quick
@given(
    split=st.sampled_from([(1, 2, 2), (1, 1, 4), (1, 4, 1), (4, 1, 1), (2, 1, 2), (2, 2, 1),
                           (1, 1, 3), (1, 3, 1), (1, 1, 2), (1, 1, 1)]),
    features=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    lead=st.lists(st.integers(1, 4), min_size=1, max_size=2),
    bias=st.booleans(),
    weights=st.sampled_from(["replicated", "root"]),
    seed=st.integers(0, 20),
    last=st.booleans(),
)  # fmt: skip
def test_the_grid_of_weight_blocks_equals_torch(
    split, features, lead, bias, weights, seed, last, proof
):
    size = unisono.world().size
    batch, outs, ins = (min(n, size) for n in split)
    if batch * outs * ins > size:
        batch, outs, ins = 1, 1, size
    ones = [1] * (len(lead) - 1)
    P_x, P_y = Partition([batch, *ones, ins]), Partition([batch, *ones, outs])
    if last:
        P_y = Partition(P_y.shape, ranks=list(range(size))[-batch * outs :])
    P_w = Partition([outs, ins] if batch == 1 else [batch, outs, ins])
    options = {"bias": bias, "dtype": torch.float64}
    ours, theirs = proof.pair(
        lambda: unn.DistributedLinear(P_x, P_y, P_w, *features, **options, weights=weights),
        lambda: nn.Linear(*features, **options),
    )
    x = proof.drawn(*lead, features[0])
    cuts = list(P_x.cuts(x.shape))
    cuts[-1] = proof.cuts_of(x.shape, P_x.shape, seed)[-1]  # the batch stays as it is cut
    proof.compare(ours, theirs, x, P_x, P_y, cuts=cuts)


@pytest.mark.ranks(RANKS)
@quick
@given(
    features=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    lead=st.tuples(st.integers(1, 4), st.integers(1, 5)),
    bias=st.booleans(),
    rows=st.booleans(),
    sequence=st.booleans(),
    halved=st.booleans(),
)
def test_column_and_row_parallel_layers_equal_torch(
    features, lead, bias, rows, sequence, halved, proof
):
    size = unisono.world().size
    batch = 2 if halved and size == 4 else 1
    along = size // batch
    split, other = Partition([batch, 1, along]), Partition([batch, along, 1])
    kind = unn.DistributedLinearReduceScatter if rows else unn.DistributedLinearAllGather
    more = {("P_y" if rows else "P_x"): other} if sequence else {}
    options = {"bias": bias, "dtype": torch.float64}
    ours, theirs = proof.pair(
        lambda: kind(split, *features, **options, **more), lambda: nn.Linear(*features, **options)
    )
    P_x = other if sequence and not rows else split
    P_y = other if sequence and rows else split
    proof.compare(ours, theirs, proof.drawn(*lead, features[0]), P_x, P_y)


@pytest.mark.ranks([2, 3])
def test_unbalanced_features_of_a_row_parallel_layer_equal_one_process(proof):
    size = unisono.world().size
    P, Q = Partition([1, 1, size]), Partition([1, size, 1])
    for where, weights in ((P, "replicated"), (Q, "root")):
        ours, theirs = proof.pair(
            lambda P_y=where, w=weights: unn.DistributedLinearReduceScatter(
                P, 7, 5, P_y=P_y, dtype=torch.float64, weights=w
            ),
            lambda: nn.Linear(7, 5, dtype=torch.float64),
        )
        for cut in (6, 3, 0):  # balanced cuts between others; one rank may see no change
            split = (0, cut, 7) if size == 2 else (0, 3, max(3, cut), 7)
            cuts = ((0, 2), (0, 3), split)
            proof.compare(ours, theirs, proof.drawn(2, 3, 7), P, where, cuts=cuts)
        proof.compare(ours, theirs, proof.drawn(2, 3, 7), P, where)


@pytest.mark.ranks(4)
def test_weights_on_the_root_live_on_the_first_rank_that_uses_a_block():
    P, Q = Partition([2, 1, 2]), Partition([2, 2, 1])
    columns = unn.DistributedLinearAllGather(P, 6, 4, weights="root")
    rows = unn.DistributedLinearReduceScatter(P, 4, 3, P_y=Q, weights="root")
    is_first = P.index[0] == 0
    assert columns.weight.shape == ((2, 6) if is_first else (0, 0))
    assert columns.bias.shape == ((2,) if is_first else (0,))
    assert rows.weight.shape == ((3, 2) if is_first else (0, 0))
    assert rows.bias.shape == ((3,) if P.rank == 0 else (0,))  # every rank adds all of it
    rows(columns(torch.ones(1, 2, 3))).sum().backward()
    for p in (*columns.parameters(), *rows.parameters()):
        assert p.grad.shape == p.shape


@pytest.mark.ranks(2, backend=["gloo", "shm"])
def test_tangents_travel_as_values_do(proof):
    P = Partition([1, 2])
    x, t = proof.drawn(3, 6), proof.drawn(6, 3).T
    expected = nn.Linear(6, 4, bias=False, dtype=x.dtype)
    for kind in (unn.DistributedLinearAllGather, unn.DistributedLinearReduceScatter):
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
    loss, target, here = unn.DistributedMSELoss(P), x.flip(0) + 1, P.local_slices((3, 6))
    with forward_ad.dual_level():
        y = loss(forward_ad.make_dual(x[here].contiguous(), t[here].contiguous()), target[here])
        z = F.mse_loss(forward_ad.make_dual(x, t.contiguous()), target)
        torch.testing.assert_close(
            forward_ad.unpack_dual(y).tangent, forward_ad.unpack_dual(z).tangent
        )
