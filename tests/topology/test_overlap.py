"""Repartition plans: the example worked out by hand, coverage of random layouts, the way back."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.topology.simulation import cut_blocks, slices

from unisono.topology import decompose
from unisono.topology.overlap import (
    LocalMove,
    Move,
    OverlapPlan,
    overlaps,
    repartition_plan,
)

ROWS = [(0, 4, 5), (0, 4)]
COLUMNS = [(0, 5), (0, 2, 3, 4)]


def example(me: int) -> OverlapPlan:
    """A 5 x 4 tensor: rows 4 + 1 on ranks 0 and 1, to columns 2 + 1 + 1 on ranks 1, 2 and 3."""
    return overlaps(ROWS, (0, 1), COLUMNS, (1, 2, 3), me)


def test_the_example_sends_what_was_worked_out_by_hand() -> None:
    assert example(0).sends == (
        Move(1, ((0, 4), (0, 2))),
        Move(2, ((0, 4), (2, 3))),
        Move(3, ((0, 4), (3, 4))),
    )
    assert example(1).sends == (Move(2, ((0, 1), (2, 3))), Move(3, ((0, 1), (3, 4))))
    assert example(1).local == LocalMove(((0, 1), (0, 2)), ((4, 5), (0, 2)))
    assert example(2).sends == example(3).sends == ()


def test_the_example_receives_what_was_worked_out_by_hand() -> None:
    assert example(0).recvs == ()
    assert example(1).recvs == (Move(0, ((0, 4), (0, 2))),)
    assert example(2).recvs == (Move(0, ((0, 4), (0, 1))), Move(1, ((4, 5), (0, 1))))
    assert example(3).recvs == (Move(0, ((0, 4), (0, 1))), Move(1, ((4, 5), (0, 1))))


@st.composite
def layouts(draw: st.DrawFn, shape: list[int]) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
    """Draw cuts of a tensor of `shape` (uneven, empty blocks too) and distinct ranks for them."""
    bounds: list[tuple[int, ...]] = []
    for n in shape:
        inner = draw(st.lists(st.integers(0, n), max_size=3))
        bounds.append((0, *sorted(inner), n))
    blocks = math.prod(len(cuts) - 1 for cuts in bounds)
    ranks = draw(st.permutations(range(blocks + 2)))[:blocks]
    return bounds, tuple(ranks)


def cut(x: torch.Tensor, bounds: list[tuple[int, ...]], place: int) -> torch.Tensor:
    return cut_blocks(x, bounds)[place]


def moved(
    blocks: dict[int, torch.Tensor], plans: dict[int, OverlapPlan]
) -> dict[int, torch.Tensor]:
    """Carry out the plans of all ranks by copies."""
    wire = {
        (me, move.peer): blocks[me][slices(move.box)]
        for me, plan in plans.items()
        for move in plan.sends
    }
    results: dict[int, torch.Tensor] = {}
    for me, plan in plans.items():
        if plan.dest_shape is None:
            assert not plan.recvs
            continue
        out = torch.full(plan.dest_shape, -1)
        boxes = [(move.box, wire.pop((move.peer, me))) for move in plan.recvs]
        if plan.local is not None:
            boxes.append((plan.local.dest, blocks[me][slices(plan.local.source)]))
        for box, values in boxes:
            assert bool((out[slices(box)] == -1).all()), "a point written twice"
            out[slices(box)] = values
        results[me] = out
    assert not wire, "messages nobody receives"
    return results


@settings(max_examples=50, deadline=None)
@given(data=st.data(), shape=st.lists(st.integers(0, 5), min_size=1, max_size=3))
def test_every_point_arrives_once_and_the_adjoint_brings_it_back(data, shape) -> None:
    src_bounds, src_ranks = data.draw(layouts(shape))
    dest_bounds, dest_ranks = data.draw(layouts(shape))
    everyone = range(max((*src_ranks, *dest_ranks)) + 2)
    plans = {me: overlaps(src_bounds, src_ranks, dest_bounds, dest_ranks, me) for me in everyone}
    x = torch.arange(math.prod(shape)).reshape(shape)
    blocks = {rank: cut(x, src_bounds, place) for place, rank in enumerate(src_ranks)}
    after = moved(blocks, plans)
    assert sorted(after) == sorted(dest_ranks)
    for place, rank in enumerate(dest_ranks):
        assert torch.equal(after[rank], cut(x, dest_bounds, place))
    back = moved(after, {me: plan.adjoint for me, plan in plans.items()})
    for rank, block in blocks.items():
        assert torch.equal(back[rank], block)
    for me, plan in plans.items():
        assert plan.adjoint == overlaps(dest_bounds, dest_ranks, src_bounds, src_ranks, me)
        assert plan.adjoint.adjoint == plan


def test_the_same_balanced_partition_twice_is_the_identity() -> None:
    bounds = [decompose.split_cuts(7, 2), decompose.split_cuts(3, 2)]
    for me in range(4):
        assert overlaps(bounds, range(4), bounds, range(4), me).is_identity
    assert not overlaps(bounds, range(4), bounds, (1, 0, 2, 3), 0).is_identity
    assert overlaps(bounds, range(4), bounds, (1, 0, 2, 3), 2).is_identity


def test_a_repartition_of_unbalanced_rows_ends_balanced() -> None:
    plan = repartition_plan([(0, 7, 10)], (0, 1), (2,), (0, 1), me=1)
    assert plan.source_shape == (3,)
    assert plan.dest_shape == (5,)
    assert plan.recvs == (Move(0, ((0, 2),)),)
