"""Many ranks train as one process with the joined batch would: both modes, models, optimizers."""

from __future__ import annotations

import copy

import pytest
import torch
from parallel_models import (
    OPTIMIZERS,
    SHAPES,
    assert_replicas_equal,
    assert_same_parameters,
    batch,
    both_modes,
    built,
    loss_of,
    mlp,
    one_step,
    train_alike,
)
from torch import nn

from unisono.comm import world
from unisono.data_parallel import DataParallel, DataParallelOptimizer


def train(make, optimizer, blocking, dtype=torch.float64, steps=5, **options):
    """Train a parallel model on this rank's data and return it."""
    module, _ = built(make, dtype)
    outer = DataParallelOptimizer(OPTIMIZERS[optimizer](module.parameters()))
    model = DataParallel(module, None, outer, blocking, **options)
    for step in range(steps):
        one_step(model, outer, batch(SHAPES[make], step, dtype)[1])
    model.eval()
    return model


def train_alone(make, optimizer, dtype=torch.float64, steps=5):
    """Train one process with the data of all ranks and return its model."""
    twin, _ = built(make, dtype)
    plain = OPTIMIZERS[optimizer](twin.parameters())
    for step in range(steps):
        one_step(twin, plain, batch(SHAPES[make], step, dtype)[0])
    return twin


def assert_equals_one_process(model, make, optimizer, dtype=torch.float64, rtol=1e-12):
    """Every rank holds the same bits, and those of rank 0 are what one process gets."""
    assert_replicas_equal(model)
    if world().rank == 0:
        assert_same_parameters(model.module, train_alone(make, optimizer, dtype), rtol=rtol)


everywhere = pytest.mark.ranks([1, 3, 4], backend=["gloo", "shm"], timeout=60)


@everywhere
@both_modes
def test_five_steps_of_every_model_equal_one_process(blocking):
    for make in SHAPES:
        model = train(make, "sgd", blocking, bucket_mb=0.001)
        assert_equals_one_process(model, make, "sgd")


@everywhere
@both_modes
def test_five_steps_of_every_optimizer_equal_one_process(blocking):
    for optimizer in OPTIMIZERS:
        for dtype, rtol in ((torch.float32, 1e-5), (torch.float64, 1e-11)):
            model = train(mlp, optimizer, blocking, dtype)
            assert_equals_one_process(model, mlp, optimizer, dtype, rtol)


@pytest.mark.ranks([2, 4], backend="shm", timeout=60)
@both_modes
def test_replicas_have_the_same_bits_after_200_steps(blocking):
    assert_replicas_equal(train(mlp, "sgd", blocking, torch.float32, steps=200))


@pytest.mark.ranks(2, backend=["gloo", "shm"], timeout=60)
def test_a_torch_optimizer_works_without_any_wrapper():
    module, twin = built(mlp)
    model = DataParallel(module)
    assert model.blocking_parameter_updates
    assert model._fwd_hook_handles == []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    twin_optimizer = torch.optim.Adam(twin.parameters(), lr=0.01)
    train_alike((model, optimizer), (twin, twin_optimizer), 4)
    assert_same_parameters(module, twin)


@pytest.mark.ranks(2)
def test_bucket_size_does_not_change_a_bit():
    small = train(mlp, "sgd", True, torch.float32, bucket_mb=0.001)
    large = train(mlp, "sgd", True, torch.float32, bucket_mb=100)
    assert len(small.buckets) > len(large.buckets) == 1
    for p, q in zip(small.parameters(), large.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.ranks(2, backend=["gloo", "shm"])
@both_modes
def test_gradients_are_views_of_the_buckets(blocking):
    module, _ = built(mlp)
    optimizer = DataParallelOptimizer(torch.optim.SGD(module.parameters(), lr=0.1))
    model = DataParallel(module, None, optimizer, blocking)
    for set_to_none in (True, False):
        optimizer.zero_grad(set_to_none=set_to_none)
        loss_of(model(batch((6,))[1])).backward()
        model.finalize()
        for bucket in model._engine.buckets:
            begin = bucket.flat.data_ptr()
            for p in bucket.params:
                assert begin <= p.grad.data_ptr() < begin + bucket.flat.nbytes
    stats = model.stats()
    assert stats.steps == 2
    assert stats.bytes_per_step == sum(bucket.flat.nbytes for bucket in model._engine.buckets)
    assert stats.wait_s_per_step > 0
    assert (stats.wait_forward_s == 0) == blocking
    assert stats.buckets == model.buckets
    assert str(stats).startswith(f"2 steps, {len(model.buckets)} buckets")


@pytest.mark.ranks(2, backend=["gloo", "shm"], timeout=60)
@both_modes
def test_batch_norm_buffers_follow_rank_0(blocking):
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).double()
    optimizer = DataParallelOptimizer(torch.optim.SGD(module.parameters(), lr=0.1))
    model = DataParallel(module, None, optimizer, blocking)
    for step in range(3):
        one_step(model, optimizer, batch((6,), step)[1])
    model(batch((6,), 9)[1] * 0 + 1.5)  # the same batch everywhere: equal from here on
    for buffer in module.buffers():
        assert world().all_equal(buffer)
    assert world().all_equal(int(module[1].num_batches_tracked))
    quiet = DataParallel(copy.deepcopy(module), broadcast_buffers=False)
    quiet(batch((6,), 5)[1])
    assert not world().all_equal(quiet.module[1].running_mean)


@pytest.mark.ranks(2, backend=["gloo", "shm"], timeout=60)
def test_complex_channels_last_and_half_parameters_are_averaged():
    torch.manual_seed(1)
    complex_part = nn.Parameter(torch.randn(3, dtype=torch.complex128))
    conv = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)
    half = nn.Linear(4, 2).to(torch.bfloat16)
    module = nn.ParameterDict({"c": complex_part})
    module.conv, module.half = conv, half
    model = DataParallel(module)
    r = world().rank + 1
    x = torch.ones(1, 4, 5, 5).to(memory_format=torch.channels_last) * r
    loss = (module["c"] * (1 + 1j) * r).real.sum() + conv(x).sum()
    (loss + half(torch.ones(1, 4, dtype=torch.bfloat16) * r).sum()).backward()
    assert torch.allclose(complex_part.grad, torch.full((3,), 1.5 * (1 - 1j)).to(torch.complex128))
    assert conv.weight.grad.stride() == conv.weight.stride()
    assert torch.allclose(conv.weight.grad, torch.full_like(conv.weight, 13.5))
    assert torch.equal(half.weight.grad, torch.full_like(half.weight, 1.5))
    assert len(model.buckets) == 3
