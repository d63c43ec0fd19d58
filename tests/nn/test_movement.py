"""Layers that only move data, against the same on whole tensors."""

from __future__ import annotations

import pickle

import pytest
import torch

import unisono
from unisono.errors import PartitionError
from unisono.nn import (
    AllGather,
    AllSumReduce,
    Broadcast,
    ReduceScatter,
    Repartition,
    SumReduce,
)
from unisono.topology import Partition


def block_of(whole, partition):
    """Return this rank's block, or nothing."""
    if not partition.active:
        return whole.new_empty(whole.shape[0], 0)
    return whole[partition.local_slices(whole.shape)].clone()


@pytest.mark.ranks(4, backend=["gloo", "shm"])
def test_repartition_moves_blocks_there_and_gradients_back():
    whole = torch.arange(30.0, dtype=torch.float64).reshape(5, 6)
    for shape_x, shape_y in [
        ((2, 2), (4, 1)),
        ((1, 4), (2, 2)),
        ((1, 1), (1, 3)),
        ((3, 1), (1, 1)),
    ]:
        P_x, P_y = Partition(shape_x), Partition(shape_y)
        layer = Repartition(P_x, P_y)
        x = block_of(whole, P_x).requires_grad_(P_x.active)
        y = layer(x)
        if P_y.active:
            assert torch.equal(y, block_of(whole, P_y))
        else:
            assert y.shape == (x.shape[0], 0)
            assert y.dtype == torch.float64
        (y * y).sum().backward()
        if P_x.active:
            assert torch.equal(x.grad, 2 * x.detach())


@pytest.mark.ranks(4)
def test_broadcast_and_sum_reduce_are_adjoint():
    P_x, P_y = Partition([1, 2], ranks=[2, 3]), Partition([2, 2])
    down, up = Broadcast(P_x, P_y), SumReduce(P_y, P_x)
    me = P_y.root.rank
    x = torch.full((2, 3), float(me), dtype=torch.float64) if P_x.active else torch.empty(2, 0)
    x.requires_grad_(P_x.active)
    y = down(x)
    assert y.shape == (2, 3)
    assert y[0, 0] == 2 + me % 2
    z = up(y)
    assert z.shape == ((2, 3) if P_x.active else (2, 0))
    z.sum().backward()
    if P_x.active:
        assert torch.equal(z, 2 * x)
        assert torch.equal(x.grad, torch.full_like(x, 2.0))


@pytest.mark.ranks(4)
def test_sums_and_gathers_run_over_their_axes_only():
    P = Partition([2, 2])
    row, column = P.index
    x = torch.full((2, 2), 10.0 * row + column, requires_grad=True)
    y = AllSumReduce(P, axes_reduce=1)(x)
    assert y[0, 0] == 20 * row + 1
    assert torch.equal(AllSumReduce(P, axes_keep=0)(x), y)
    gathered = AllGather(P, axes_all_gather=0)(x)
    assert gathered.shape == (4, 2)
    assert gathered[:, 0].tolist() == [column, column, 10 + column, 10 + column]
    gathered.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2.0))
    scattered = ReduceScatter(P, axes_reduce_scatter=1)(torch.ones(2, 3))
    assert scattered.shape == (2, 2 if column == 0 else 1)
    assert (scattered == 2).all()


def test_one_process_is_a_partition_too():
    P = Partition([1, 1])
    x = torch.randn(3, 4)
    for layer in (Repartition(P, P), Broadcast(P, P), SumReduce(P, P), AllGather(P, 0)):
        assert torch.equal(layer(x), x)


@pytest.mark.ranks([2, 3], backend=["gloo", "shm"])
def test_large_blocks_move_there_and_back_from_slice_to_slice():
    size = unisono.world().size
    whole = torch.arange(300.0 * 700, dtype=torch.float64).reshape(300, 700)
    P_x, P_y = Partition([size, 1]), Partition([1, size])
    layer = Repartition(P_x, P_y)
    for step in range(4):
        given = whole + step if step != 2 else whole[:299] + step  # one rank's block changes
        x = block_of(given, P_x).requires_grad_()
        y = layer(x)
        assert torch.equal(y, block_of(given, P_y))
        (y * y).sum().backward()
        assert torch.equal(x.grad, 2 * x.detach())
    copy = pickle.loads(pickle.dumps(layer))
    assert torch.equal(copy(x.detach()), y)


@pytest.mark.ranks(2)
def test_axes_that_are_not_there_are_refused_on_all_ranks():
    P = Partition([1, 2])
    with pytest.raises(
        PartitionError, match=r"(?s)no dim 1 in a tensor of 1 dims.*HINT: a tensor of 2"
    ):
        ReduceScatter(P, 1)(torch.ones(4))
    for wrong, text in ((7, "7 >= 2"), (-3, "-3 < -2")):
        with pytest.raises(PartitionError, match=f"(?s)scale_backward.*{text}.*HINT"):
            AllGather(P, 1, scale_backward=wrong)
    with pytest.raises(TypeError, match="scale_backward='1'"):
        AllGather(P, 1, scale_backward="1")
    x = torch.ones(1, 1, requires_grad=True)
    AllGather(P, 1, scale_backward=-1)(x).sum().backward()
    assert x.grad.item() == 1.0  # two ranks seed it, and it is divided by two
