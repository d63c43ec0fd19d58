"""The layout of buckets, which is pure, and the views into them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from unisono.data_parallel.bucket import GradientBucket
from unisono.operators.gradients import plan_buckets


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


def make_bucket(*shapes, dtype=torch.float32):
    params = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    names = [f"p{i}" for i in range(len(shapes))]
    return GradientBucket(0, names, params, lambda n, t, d: torch.zeros(n, dtype=t, device=d))


def test_slots_share_the_flat_memory_and_do_not_overlap():
    bucket = make_bucket((300, 200), (3,), (7, 5), (200, 300), ())
    for i, slot in enumerate(bucket.slots):
        slot.fill_(i + 1)
    for i, (slot, param) in enumerate(zip(bucket.slots, bucket.params, strict=True)):
        assert slot.shape == param.shape
        assert torch.equal(slot, torch.full_like(param, i + 1))
    assert torch.equal(bucket.flags, torch.zeros(5))
    assert bucket.info.numel == sum(p.numel() for p in bucket.params)
    assert bucket.nbytes < 4 * bucket.info.numel * 1.01


def test_a_slot_has_the_strides_of_its_parameter():
    weight = nn.Parameter(torch.zeros(4, 3, 5, 5).to(memory_format=torch.channels_last))
    bucket = GradientBucket(0, ["w"], [weight], lambda n, t, d: torch.zeros(n, dtype=t, device=d))
    assert bucket.slots[0].stride() == weight.stride()


@pytest.mark.parametrize("factor", [None, 0.5])
def test_filling_takes_gradients_from_anywhere_once(factor):
    bucket = make_bucket((300, 200), (3,), (200, 300), (4,))
    grads = [torch.full_like(p, i + 1.0) for i, p in enumerate(bucket.params)]
    for i in (0, 1, 2):
        bucket.params[i].grad = grads[i]
        bucket.used[i] = True
    bucket.file_large(0, factor)
    bucket.fill(factor)
    weight = 1.0 if factor is None else factor
    for i in (0, 1, 2):
        assert bucket.params[i].grad is bucket.slots[i]
        assert torch.equal(bucket.slots[i], torch.full_like(bucket.slots[i], (i + 1) * weight))
        assert torch.equal(grads[i], torch.full_like(grads[i], i + 1.0))
    assert bucket.flags.tolist() == [1, 1, 1, 0]
    assert not bucket.slots[3].any()
    bucket.resolve_unused()
    assert bucket.params[3].grad is None
    assert bucket.idle == {3}
    bucket.fill(None)
    bucket.flags[3] = 2.0
    bucket.resolve_unused()
    assert bucket.params[3].grad is bucket.slots[3]
