"""Gradients that travel compressed: how far off they are, and that nothing is lost for good."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from parallel_models import assert_replicas_equal, batch, both, built, loss_of, mlp
from tests.repeated import repeated
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from unisono.comm import world
from unisono.data_parallel import DataParallel, DataParallelOptimizer


def gradients_of(module, twin, **options):
    """Return averaged gradients of a parallel module and those of its twin on all data."""
    model = DataParallel(module, **options)
    everything, mine = batch((6,))
    loss_of(model(mine)).backward()
    loss_of(twin(everything)).backward()
    pairs = zip(module.parameters(), twin.parameters(), strict=True)
    return [(p.grad, q.grad) for p, q in pairs]


@both
@repeated(("name", "eps"), [("bf16", 2**-8), ("fp16", 2**-11)])
def test_16_bit_gradients_are_off_by_their_rounding_only(name, eps):
    for dtype in (torch.float32, torch.float64):
        module, twin = built(mlp, dtype)
        model = DataParallel(module, compression=name, bucket_mb=0.001)
        everything, mine = batch((6,), dtype=dtype)
        loss_of(model(mine)).backward()
        loss_of(twin(everything)).backward()
        for p, q in zip(module.parameters(), twin.parameters(), strict=True):
            # One rounding of each rank's share, one of the sum; shares may cancel in it.
            size = max(1e-3, float(p.grad.abs().max())) * 4
            assert (p.grad - q.grad).abs().max() <= 2 * eps * size
            assert not torch.equal(p.grad, q.grad)
            assert p.grad.dtype == dtype
            assert world().all_equal(p.grad)


@both
def test_16_bit_gradients_work_when_updates_are_deferred():
    module, _ = built(mlp, torch.float32)
    optimizer = DataParallelOptimizer(torch.optim.SGD(module.parameters(), lr=0.1))
    model = DataParallel(module, None, optimizer, compression="bf16", bucket_mb=0.001)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model(batch((6,), step, torch.float32)[1])).backward()
        optimizer.step()
    model.finalize()
    assert_replicas_equal(module)


@both
def test_hooks_written_for_torch_ddp_run():
    group = dist.group.WORLD
    for hook, tolerance in (
        (functools.partial(default_hooks.allreduce_hook, group), 1e-12),
        (functools.partial(default_hooks.bf16_compress_hook, group), 2e-2),
    ):
        module, twin = built(mlp)
        for grad, wanted in gradients_of(module, twin, compression=hook, bucket_mb=0.001):
            torch.testing.assert_close(grad, wanted, rtol=tolerance, atol=tolerance)
    state = powerSGD_hook.PowerSGDState(
        group, matrix_approximation_rank=40, start_powerSGD_iter=2, min_compression_rate=0.1
    )
    module, _ = built(mlp)
    model = DataParallel(module, compression=functools.partial(powerSGD_hook.powerSGD_hook, state))
    for step in range(4):
        model.zero_grad()
        loss_of(model(batch((6,), step)[1])).backward()
        assert all(world().all_equal(p.grad) for p in module.parameters())


@both
def test_a_function_sees_buckets_and_unused_parameters_stay_unused():
    class Lazy(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle, self.rare = (nn.Linear(6, 2) for _ in range(3))

        def forward(self, x):
            return self.used(x) + (self.rare(x) if world().rank == 0 else 0)

    seen = []

    def hook(bucket):
        seen.append((bucket.index(), bucket.is_last(), len(bucket.gradients())))
        assert [g.shape for g in bucket.gradients()] == [p.shape for p in bucket.parameters()]
        work = dist.all_reduce(bucket.buffer().div_(world().size), async_op=True)
        bucket.set_buffer(bucket.buffer())
        return work.get_future()

    torch.manual_seed(0)
    module = Lazy()
    model = DataParallel(module, compression=hook, bucket_mb=0.00005)
    loss_of(model(torch.ones(2, 6))).backward()
    assert seen == [
        (i, i == len(model.buckets) - 1, len(b.names)) for i, b in enumerate(model.buckets)
    ]
    assert module.idle.weight.grad is None
    assert module.rare.weight.grad is not None
    assert all(world().all_equal(p.grad) for p in (module.used.weight, module.rare.weight))


@both
def test_stats_count_the_bytes_that_travel():
    torch.manual_seed(0)
    counted = {}
    for name, compression in {"plain": None, "half": "bf16"}.items():
        model = DataParallel(nn.Linear(64, 48), compression=compression)
        model(torch.randn(4, 64)).mean().backward()
        counted[name] = model.stats().bytes
    numbers = 64 * 48 + 48 + 2
    assert counted["plain"] == 4 * numbers
    share = -(-numbers // 3)
    assert counted["half"] == (2 * numbers if world().backend == "shm" else 2 * 4 * share)
