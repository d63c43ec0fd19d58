"""One policy for gradients of several ranks, inside a backward and after it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from unisono.comm import world
from unisono.operators.gradients import (
    BackwardWatch,
    EarlierGradients,
    GradientPolicy,
    plan_buckets,
    reduce_gradients,
    summed_gradients,
)


@settings(deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 50), st.sampled_from("ab")), max_size=20),
    limit=st.integers(1, 60),
)
def test_every_parameter_is_in_one_bucket_in_reverse_order(sizes, limit):
    plan = plan_buckets(sizes, limit, first_bytes=10)
    flat = [i for members in plan for i in members]
    assert sorted(flat) == list(range(len(sizes)))
    for members in plan:
        assert members == sorted(members, reverse=True)
        assert len({sizes[i][1] for i in members}) == 1
        assert len(members) == 1 or sum(sizes[i][0] for i in members) <= limit
    if plan:
        assert sum(sizes[i][0] for i in plan[0][:-1]) < 10
    assert [members[0] for members in plan] == sorted(
        (members[0] for members in plan), reverse=True
    )


@pytest.mark.ranks(4, backend=["gloo", "shm"])
def test_terms_are_summed_over_a_row_and_replicas_averaged_over_a_column():
    comm = world()
    row = comm.sub([comm.rank // 2 * 2, comm.rank // 2 * 2 + 1])
    column = comm.sub([comm.rank % 2, comm.rank % 2 + 2])
    of_terms = GradientPolicy(sum_over=(row,), mean_over=(column,))
    of_whole = GradientPolicy(mean_over=(row, column))
    assert of_terms.ranks == of_whole.ranks == {row.ranks[0], row.ranks[1], *column.ranks}
    terms, whole, here_only, unused, frozen = (nn.Parameter(torch.zeros(3)) for _ in range(5))
    frozen.requires_grad_(False)
    terms.grad = torch.full((3,), 1.0 + comm.rank)
    whole.grad = torch.full((3,), 1.0 + comm.rank)
    if comm.rank == 2:
        here_only.grad = torch.full((3,), 8.0)
    policies = [(p, of_terms) for p in (terms, here_only, unused, frozen)]
    reduce_gradients([*policies, (whole, of_whole)], bucket_mb=1e-5)
    assert terms.grad.tolist() == [5.0] * 3  # ((1 + 2) + (3 + 4)) / 2
    assert whole.grad.tolist() == [2.5] * 3
    assert here_only.grad.tolist() == [4.0] * 3
    assert unused.grad is None
    assert frozen.grad is None


@pytest.mark.ranks([1, 2, 3])
def test_gradients_are_summed_inside_of_a_backward_to_any_order(rank_count):
    weight = nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    scale = torch.tensor(1.0 + world().rank, dtype=torch.float64)
    total = sum(range(1, rank_count + 1))
    (shared,) = summed_gradients(world(), weight)
    (first,) = torch.autograd.grad((scale * shared**3).sum(), weight, create_graph=True)
    assert first.item() == total * 3 * 4
    (second,) = torch.autograd.grad(first.sum(), weight)
    assert second.item() == total * 6 * 2  # as in one process: what all ranks hold counts once


def test_earlier_gradients_are_added_to_or_put_back():
    kept, fresh = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    kept.grad = torch.tensor([1.0, 2.0])
    earlier = EarlierGradients([kept, fresh])
    (3 * kept + fresh).sum().backward()
    earlier.add()
    assert kept.grad.tolist() == [4.0, 5.0]
    assert fresh.grad.tolist() == [1.0, 1.0]
    earlier = EarlierGradients([kept])
    kept.sum().backward()
    earlier.put_back()
    assert kept.grad.tolist() == [4.0, 5.0]


class Raises(torch.autograd.Function):
    """The identity, whose backward fails."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError


@pytest.mark.parametrize("fails", [False, True])
def test_a_backward_is_watched_to_its_end_or_until_it_raises(fails):
    watch, events = BackwardWatch(), []
    weight = nn.Parameter(torch.ones(2))

    def begin(_):
        if not watch.is_running:
            watch.begin(lambda: events.append("end"))

    weight.register_hook(begin)
    early = Raises.apply(weight) if fails else weight.clone()
    loss = (early * 2).sum() + weight.sum()
    loss.register_hook(begin)
    if fails:
        with pytest.raises(ArithmeticError):
            loss.backward()
    else:
        loss.backward()
    assert (watch.is_open, watch.is_running) == (True, False)
    assert events == ([] if fails else ["end"])
    watch.close()
    assert not watch.is_open
