"""Layers that only move data, against the same on whole tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.nn.drawing import RANKS, quick
from torch import nn

import unisono
import unisono.nn as unn
from unisono.errors import PartitionError
from unisono.topology import Partition


@pytest.mark.ranks(RANKS)
@quick
@given(
    shape=st.lists(st.integers(2, 7), min_size=2, max_size=3),
    ways=st.tuples(st.integers(0, 5), st.integers(0, 5)),
    firsts=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    seed=st.integers(0, 40),
)
def test_repartition_moves_any_cuts_to_balanced_blocks(shape, ways, firsts, seed, proof):
    size = unisono.world().size

    def some(way, first):
        count = (1, 2, 3, 4, size, size)[way]
        count = min(count, size)
        grid = [1] * len(shape)
        grid[way % len(shape)] = count
        if count == 4 and way == 5:
            grid = [2, 2, *[1] * (len(shape) - 2)]
        ranks = [(first + r) % size for r in range(count)]
        return Partition(grid, ranks=ranks)

    P_x, P_y = some(ways[0], firsts[0]), some(ways[1], firsts[1])
    proof.compare(
        unn.Repartition(P_x, P_y), nn.Identity(), proof.drawn(*shape), P_x, P_y, seed=seed
    )


@pytest.mark.ranks(4)
@quick
@given(
    shape=st.lists(st.integers(0, 4), min_size=2, max_size=2),
    turned=st.tuples(st.booleans(), st.booleans()),
    case=st.sampled_from([((1, 2), (2, 2)), ((2, 1), (2, 2)), ((1,), (2, 2)), ((2,), (2, 2)),
                          ((2, 2), (2, 2)), ((1, 1), (4, 1)), ((1, 3), (1, 3))]),
    first=st.integers(0, 3),
)  # fmt: skip
def test_broadcast_and_sum_are_adjoint_between_any_two_partitions(
    shape, turned, case, first, proof
):
    world = unisono.world()
    small, large = case
    src = Partition(small, ranks=[(first + r) % 4 for r in range(torch.Size(small).numel())])
    dest = Partition(large)
    try:
        layer = unn.Broadcast(src, dest, *turned)
    except PartitionError:
        with pytest.raises(PartitionError, match="against"):
            unn.SumReduce(dest, src, turned[1], turned[0])
        return
    back = unn.SumReduce(dest, src, turned[1], turned[0])
    x = proof.drawn(*shape, seed=world.rank) if src.active else torch.empty(2, 0)
    x.requires_grad_()
    y = layer(x)
    assert y.dtype == torch.float64 or not layer._takes_part
    v = proof.drawn(*y.shape, seed=9 + world.rank)
    (gradient,) = torch.autograd.grad(y, x, v.to(y), create_graph=True)
    adjoint = back(v)
    if src.active:
        torch.testing.assert_close(gradient.to(adjoint), adjoint)
    forward = world.all_reduce((y * v).sum().detach().double())
    backward = world.all_reduce((x * gradient).sum().detach().double())
    torch.testing.assert_close(forward, backward)


@pytest.mark.ranks(RANKS)
@quick
@given(
    shape=st.lists(st.integers(1, 6), min_size=2, max_size=3),
    axis=st.integers(0, 2),
    seed=st.integers(0, 20),
)
def test_sums_and_joins_over_an_axis_equal_torch(shape, axis, seed, proof):
    world = unisono.world()
    size = world.size
    axis %= len(shape)
    P = Partition([size if i == axis else 1 for i in range(len(shape))])
    x = proof.drawn(*shape)
    cuts = proof.cuts_of(shape, P.shape, seed)
    where = proof.own_slices(P, cuts)
    own = x[where].clone().requires_grad_()
    joined = unn.AllGather(P, axes_all_gather=axis)(own)
    assert torch.equal(joined, x)
    weights = proof.ramp(x)
    ((joined**2) * weights * (world.rank + 1)).sum().backward()
    factor = size * (size + 1) / 2  # every rank's use of the joined tensor counts
    torch.testing.assert_close(own.grad, 2 * factor * (x * weights)[where])

    whole = (x * (world.rank + 1)).requires_grad_()
    kept = unn.ReduceScatter(P, axes_reduce_scatter=axis)(whole)
    here = P.local_slices(shape)
    torch.testing.assert_close(kept, x[here] * factor)
    (kept**2).sum().backward()
    torch.testing.assert_close(whole.grad, 2 * x * factor)

    each = x.clone().requires_grad_()
    total = unn.AllSumReduce(P, axes_reduce=axis)(each * (world.rank + 1))
    torch.testing.assert_close(total, x * factor)
    (total**2).sum().backward()
    torch.testing.assert_close(each.grad, 2 * x * factor * size * (world.rank + 1))


@pytest.mark.ranks(2)
def test_a_scatter_notices_what_only_its_root_sees_and_flipping_gradients_sets_nothing_up():
    one, two = Partition([1, 1]), Partition([2, 1])
    layer = unn.Repartition(one, two)
    setups = 0
    for shape, dtype in (((4, 3), torch.float32), ((6, 3), torch.float32), ((6, 5), torch.float32),
                         ((6, 5), torch.float64), ((6, 5), torch.complex64), ((6, 5), torch.int32),
                         ((6, 5), torch.bool), ((6, 5), torch.uint8)):  # fmt: skip
        whole = torch.arange(shape[0] * shape[1]).reshape(shape).to(dtype)
        y = layer(whole if one.active else torch.empty(0))
        assert torch.equal(y, whole[two.local_slices(shape)])
        assert y.dtype == dtype
        setups += 1
        assert layer._setups == setups
    whole = torch.arange(30.0).reshape(6, 5)
    for needed in (False, True, False, True):
        x = whole.clone().requires_grad_(needed) if one.active else torch.empty(0)
        y = layer(x)
        assert y.requires_grad == needed
        if needed:
            (y**2).sum().backward()
            if one.active:
                assert torch.equal(x.grad, 2 * whole)
    assert layer._setups == setups + 1


@pytest.mark.ranks(4)
def test_partitions_may_be_disjoint_or_overlap(proof):
    x = proof.drawn(3, 4, 9)
    for before, after in (((0, 1), (2, 3)), ((0, 1), (1, 2)), ((3, 1), (0, 3)), ((2,), (0, 1))):
        P_x, P_y = (
            Partition([1, 1, len(before)], ranks=before),
            Partition([1, len(after), 1], ranks=after),
        )
        proof.compare(unn.Repartition(P_x, P_y), nn.Identity(), x, P_x, P_y)
    few, one = Partition([1, 2], ranks=[3, 1]), Partition([1, 1], ranks=[0])
    for grid in ((1, 2), (2, 3), (3, 1)):
        ours, theirs = proof.pair(
            lambda g=grid: unn.DistributedLinear(
                few, one, Partition([1, 2], ranks=g), 7, 5
            ).double(),
            lambda: nn.Linear(7, 5).double(),
        )
        proof.compare(ours, theirs, proof.drawn(4, 7), few, one)


@pytest.mark.ranks(3)
def test_results_without_elements_have_the_dtype_of_the_data():
    first, others = Partition([1, 1]), Partition([2, 1], ranks=[1, 2])
    for dtype in (torch.float64, torch.bfloat16, torch.complex64, torch.int64):
        x = torch.ones(4, 3).to(dtype) if first.active else torch.empty(5, 0)
        y = unn.Repartition(first, others)(x)
        assert y.dtype == dtype
        assert y.shape == ((2, 3) if others.active else (4, 0))
        z = unn.Broadcast(first, others, preserve_batch=False)(x)
        assert z.dtype == dtype
        assert z.shape == ((4, 3) if others.active else (0,))
    P_w = Partition([2, 1, 1], ranks=[1, 2])
    layer = unn.DistributedGeneralConv1d(
        Partition([1, 1, 1]), Partition([1, 2, 1], ranks=[1, 2]), P_w, 2, 4, 3, groups=2
    ).double()
    y = layer(torch.ones(2, 2, 5).double() if first.active else torch.empty(0))
    assert y.dtype == torch.float64
    assert y.shape == ((2, 0) if first.active else (2, 2, 3))


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool], ids=str
)
def test_integers_are_moved(dtype):
    P, Q, first = Partition([3, 1]), Partition([1, 3]), Partition([1, 1])
    x = torch.arange(15).reshape(5, 3).to(dtype)
    own = x[P.local_slices(x.shape)]
    assert torch.equal(unn.Repartition(P, Q)(own), x[Q.local_slices(x.shape)])
    assert torch.equal(unn.AllGather(P, 0)(own), x)
    spread = unn.Broadcast(first, P)(x if first.active else torch.empty(0))
    assert torch.equal(spread, x)
    window = unn.HaloExchange(P, (3, 1), padding=((1, 1), (0, 0)))(own)
    assert window.dtype == dtype
    padded = nn.functional.pad(x.long(), (0, 0, 1, 1)).to(dtype)
    start = P.local_slices(x.shape)[0].start
    assert torch.equal(window, padded[start : start + len(window)])
    if dtype not in (torch.bool, torch.uint8):
        assert torch.equal(unn.AllSumReduce(P, 0)(x), 3 * x)
        assert torch.equal(unn.ReduceScatter(P, 0)(x), 3 * x[P.local_slices(x.shape)])
        total = unn.SumReduce(P, first)(x)
        assert torch.equal(total, 3 * x if first.active else torch.empty(5, 0, dtype=dtype))
