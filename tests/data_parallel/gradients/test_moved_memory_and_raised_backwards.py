"""What happens to gradients behind our back: casts, new memory, and a backward that raised."""

from __future__ import annotations

import copy

import pytest
import torch
from parallel_models import (
    OPTIMIZERS,
    assert_replicas_equal,
    assert_same_gradients,
    assert_same_parameters,
    batch,
    both_modes,
    built,
    cnn,
    loss_of,
    mlp,
)
from torch import nn

from unisono.comm import world
from unisono.data_parallel import DASO, DataParallel, DataParallelMultiGPU, DataParallelOptimizer

both = pytest.mark.ranks(2, backend=["gloo", "shm"], timeout=60)


def large():
    """Gradients above and below the size that is filed at once."""
    return nn.Sequential(nn.Linear(6, 200), nn.Tanh(), nn.Linear(200, 200), nn.Linear(200, 3))


def to_and_back(module):
    module.float().double()


def channels_last(module):
    module.to(memory_format=torch.channels_last)


def another_width(module):
    """Replace the last layer's values by those of a layer with one output more."""
    last = module[-1]
    with torch.no_grad():
        wider = torch.cat([last.weight, last.weight[:1]])
        last.weight.grad = last.bias.grad = None
        last.weight.data = wider
        last.bias.data = torch.cat([last.bias, last.bias[:1]]).detach()


@both
@both_modes
def test_gradients_are_averaged_after_memory_has_moved(blocking):
    for disturb in (to_and_back, channels_last, another_width):
        train_with(disturb, blocking)


def train_with(disturb, blocking):
    module, twin = built(cnn)
    optimizer = DataParallelOptimizer(OPTIMIZERS["sgd"](module.parameters()))
    model = DataParallel(module, None, optimizer, blocking)
    twin_optimizer = OPTIMIZERS["sgd"](twin.parameters())
    for step in range(4):
        everything, mine = batch((2, 6, 6), step)
        loss_of(model(mine)).backward()
        loss_of(twin(everything)).backward()
        if step == 1:  # with gradients that lie in the buckets
            model.finalize()
            disturb(module)
            disturb(twin)
        else:
            optimizer.step()
            twin_optimizer.step()
            optimizer.zero_grad(set_to_none=step == 2)
            twin_optimizer.zero_grad(set_to_none=step == 2)
        if step == 1 and disturb is another_width:
            for one, its_optimizer in ((module, optimizer), (twin, twin_optimizer)):
                its_optimizer.state.pop(one[-1].weight, None)
                its_optimizer.state.pop(one[-1].bias, None)
    model.finalize()
    # Values went through float32 and back, and the gradients of the two runs were rounded there.
    assert_same_parameters(module, twin, rtol=1e-6 if disturb is to_and_back else 1e-12)
    assert_replicas_equal(module)


@both
def test_a_cast_and_back_keeps_the_sum_inside_a_node_of_daso():
    module, _ = built(mlp)
    daso = DASO(torch.optim.SGD(module.parameters(), lr=0.1), 2, ranks_per_node=2)
    daso.last_batch = 3
    model = DataParallelMultiGPU(module, daso)
    loss_of(model(batch((6,))[1])).backward()
    to_and_back(module)
    loss_of(model(batch((6,), 1)[1])).backward()
    assert all(world().all_equal(p.grad) for p in module.parameters())


class Refuses(torch.autograd.Function):
    """The identity, with a backward that raises when told to."""

    @staticmethod
    def forward(ctx, x, refuses):
        ctx.refuses = refuses
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        if ctx.refuses:
            raise ArithmeticError("refused")
        return grad, None


class FailsMidway(nn.Module):
    """Its backward can raise when gradients of the last layers are there already."""

    def __init__(self):
        super().__init__()
        self.layers = large()
        self.extra = nn.Linear(200, 3)
        self.refuses = False

    def forward(self, x, extra=True):
        h = Refuses.apply(self.layers[1](self.layers[0](x)), self.refuses)
        h = self.layers[2](h)
        return self.layers[3](h) + (self.extra(h) if extra else 0)


def train_through_a_failure(clear, bucket_mb, blocking):
    module, twin = built(FailsMidway)
    optimizer = DataParallelOptimizer(OPTIMIZERS["sgd"](module.parameters()))
    model = DataParallel(module, None, optimizer, blocking, bucket_mb=bucket_mb)
    twin_optimizer = OPTIMIZERS["sgd"](twin.parameters())
    cleared = optimizer if clear.startswith("ours") else optimizer.torch_optimizer
    for step in range(4):
        everything, mine = batch((6,), step)
        cleared.zero_grad(set_to_none="none" in clear)
        twin_optimizer.zero_grad(set_to_none="none" in clear)
        module.refuses = step == 1
        extra = step != 2  # what the failed backward used, this one does not
        if module.refuses:
            # Over a network ranks have sent different numbers of buckets by then.
            with pytest.raises(ArithmeticError, match="refused"):
                loss_of(model(mine, world().rank == 1)).backward()
            cleared.zero_grad(set_to_none="none" in clear)  # while they travel
            twin_optimizer.zero_grad(set_to_none="none" in clear)
            continue
        loss_of(model(mine, extra)).backward()
        loss_of(twin(everything, extra)).backward()
        optimizer.step()
        twin_optimizer.step()
    model.finalize()
    assert_same_parameters(module, twin)
    assert_replicas_equal(module)


@both
@both_modes
def test_gradients_are_right_again_after_a_backward_that_raised(blocking):
    for bucket_mb in (None, 0.001):
        # Without our knowledge zeros would be written to gradients that still travel.
        for clear in ("ours", "ours, none", "torch, none", *["torch"] * blocking):
            train_through_a_failure(clear, bucket_mb, blocking)


@both
@both_modes
def test_an_older_graph_is_averaged_after_a_backward_that_raised(blocking):
    for bucket_mb in (None, 0.001):
        module, twin = built(FailsMidway)
        optimizer = DataParallelOptimizer(OPTIMIZERS["sgd"](module.parameters()))
        model = DataParallel(module, None, optimizer, blocking, bucket_mb=bucket_mb)
        everything, mine = batch((6,))
        older = loss_of(model(mine))
        module.refuses = True
        with pytest.raises(ArithmeticError, match="refused"):
            loss_of(model(2 * mine)).backward()
        optimizer.zero_grad(set_to_none=True)
        older.backward()  # no forward comes between
        loss_of(twin(everything)).backward()
        model.finalize()
        assert_same_gradients(module, twin)


@both
def test_a_gradient_that_was_cleared_does_not_count_as_used():
    module, twin = built(FailsMidway)
    model = DataParallel(module)
    everything, mine = batch((6,))
    with model.no_sync():
        loss_of(model(mine)).backward()
    model.zero_grad()
    # Rank 0 does not use `extra` now; what it had of the cleared gradient must not come back.
    loss_of(model(mine, world().rank == 1)).backward()
    first, second = everything.chunk(2)
    ((loss_of(twin(first, False)) + loss_of(twin(second))) / 2).backward()
    assert_same_gradients(module, twin)


@both
@both_modes
def test_a_fused_optimizer_steps_with_unscaled_gradients(blocking):
    module, twin = built(mlp, torch.float32)
    optimizer = DataParallelOptimizer(torch.optim.SGD(module.parameters(), lr=0.1, fused=True))
    model = DataParallel(module, None, optimizer, blocking)
    twin_optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(3):
        everything, mine = batch((6,), step, torch.float32)
        optimizer.zero_grad()
        loss = loss_of(model(mine))
        if step == 1 and world().rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step != 1:  # the infinite gradient is left out, on all ranks
            twin_optimizer.zero_grad()
            loss_of(twin(everything)).backward()
            twin_optimizer.step()
    model.finalize()
    assert_same_parameters(module, twin, rtol=1e-5)
    assert_replicas_equal(module)


@both
def test_zero_grad_of_an_optimizer_clears_its_own_parameters_only():
    module, _ = built(mlp)
    optimizers = [
        DataParallelOptimizer(torch.optim.SGD(part.parameters(), lr=0.1))
        for part in (module[0], module[2:])
    ]
    model = DataParallel(module, None, optimizers, True)
    loss_of(model(batch((6,))[1])).backward()
    kept = copy.deepcopy([p.grad for p in module[0].parameters()])
    optimizers[1].zero_grad()
    assert all(not p.grad.any() for p in module[2:].parameters())
    for p, grad in zip(module[0].parameters(), kept, strict=True):
        assert torch.equal(p.grad, grad)
    optimizers[0].zero_grad(set_to_none=True)
    assert all(p.grad is None for p in module[0].parameters())
