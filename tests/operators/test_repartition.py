"""Repartition on real ranks: the right blocks arrive, and gradients take the way back."""

from __future__ import annotations

import pytest
import torch
from tests.operators.checks import block_at, drawn

from unisono.comm import world
from unisono.errors import PartitionError
from unisono.operators import repartition
from unisono.topology import decompose, overlap


def block_of(x, bounds, ranks, me):
    if me not in ranks:
        return x.new_empty(0)
    index = decompose.grid_index([len(c) - 1 for c in bounds], ranks.index(me))
    return block_at(x, bounds, index)


@pytest.mark.ranks(4)
def test_the_hand_worked_example_arrives_and_returns():
    me = world().rank
    x = torch.arange(20.0).reshape(5, 4)
    rows, columns = [(0, 4, 5), (0, 4)], [(0, 5), (0, 2, 3, 4)]
    plan = overlap.overlaps(rows, (0, 1), columns, (1, 2, 3), me)
    mine = block_of(x, rows, (0, 1), me).clone().requires_grad_()
    y = repartition(mine, plan)
    assert torch.equal(y.detach(), block_of(x, columns, (1, 2, 3), me))
    y.backward(2 * y.detach())
    assert torch.equal(mine.grad, 2 * mine.detach())


@pytest.mark.ranks([1, 2, 3, 4])
@pytest.mark.parametrize("sizes", [[2, 2, 2, 2], [5, 0, 1, 2], [0, 0, 1, 0]])
def test_rows_become_columns_in_every_dtype(sizes):
    comm = world()
    rows = [decompose.bounds(sizes[: comm.size]), (0, 3), (0, 2)]
    columns = [(0, rows[0][-1]), decompose.split_cuts(3, comm.size), (0, 2)]
    ranks = tuple(range(comm.size))
    plan = overlap.overlaps(rows, ranks, columns, ranks, comm.rank)
    for dtype in (torch.float64, torch.complex128, torch.bfloat16, torch.int32, torch.bool):
        x = (10 * drawn(*(c[-1] for c in rows))).to(dtype)
        y = repartition(block_of(x, rows, ranks, comm.rank), plan, comm=comm)
        assert y.dtype == dtype
        assert torch.equal(y, block_of(x, columns, ranks, comm.rank))


@pytest.mark.ranks([1, 2])
def test_the_same_layout_copies_nothing():
    comm = world()
    bounds = [decompose.split_cuts(5, comm.size)]
    ranks = tuple(range(comm.size))
    plan = overlap.overlaps(bounds, ranks, bounds, ranks, comm.rank)
    x = drawn(*plan.source_shape)
    assert repartition(x, plan, comm=comm).data_ptr() == x.data_ptr()


@pytest.mark.ranks(2)
def test_non_contiguous_blocks_are_sent_as_their_values_and_left_alone():
    comm = world()
    rows, columns = [(0, 3, 4), (0, 4)], [(0, 4), (0, 1, 4)]
    x = drawn(4, 4)
    plan = overlap.overlaps(rows, (0, 1), columns, (0, 1), comm.rank)
    mine = block_of(x, rows, (0, 1), comm.rank).t().contiguous().t()
    kept = mine.clone()
    y = repartition(mine, plan, comm=comm)
    assert torch.equal(y, block_of(x, columns, (0, 1), comm.rank))
    assert torch.equal(mine, kept)


@pytest.mark.ranks(2)
def test_plans_of_another_rank_or_shape_are_refused():
    comm = world()

    def plan(me):
        return overlap.overlaps([(0, 4)], (0,), [(0, 2, 4)], (0, 1), me)

    with pytest.raises(PartitionError, match=f"me={comm.rank}"):
        repartition(torch.ones(4), plan(1 - comm.rank))
    with pytest.raises(PartitionError, match="HINT") as caught:
        repartition(torch.ones(5), plan(comm.rank))
    wanted = "a plan for shape [4]" if comm.rank == 0 else "not in the source partition"
    assert wanted in str(caught.value)
