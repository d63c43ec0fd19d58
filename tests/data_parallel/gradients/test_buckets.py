"""The views of gradients into a bucket."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from unisono.data_parallel.bucket import GradientBucket


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
