"""Gradients that are missing, sparse, or come more than once in a backward."""

from __future__ import annotations

import copy

import pytest
import torch
from parallel_models import (
    assert_replicas_equal,
    assert_same_gradients,
    assert_same_parameters,
    batch,
    both,
    both_modes,
    built,
    loss_of,
    mlp,
    one_step,
    sgd,
    wrapped,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from unisono.comm import world
from unisono.data_parallel import DataParallel, DataParallelOptimizer


class Branches(nn.Module):
    """Which layer is used depends on the input's first number; `never` is not used at all."""

    def __init__(self):
        super().__init__()
        self.left = nn.Linear(4, 2)
        self.right = nn.Linear(4, 2)
        self.never = nn.Linear(4, 2)

    def forward(self, x, right):
        return self.right(x) if right else self.left(x)


@both
@both_modes
def test_branches_that_depend_on_the_rank_average_with_zeros(blocking):
    comm = world()
    module, twin = built(Branches)
    model, optimizer = wrapped(module, blocking, bucket_mb=0.0001)
    twin_optimizer = sgd(twin)
    xs = [
        torch.randn(3, 4, generator=torch.Generator().manual_seed(r)).double()
        for r in range(comm.size)
    ]
    for step in range(4):
        right = [step != 1 and (r + step) % 2 == 1 for r in range(comm.size)]
        optimizer.zero_grad(set_to_none=True)
        loss_of(model(xs[comm.rank], right[comm.rank])).backward()
        optimizer.step()
        twin_optimizer.zero_grad()
        losses = [loss_of(twin(x, go)) for x, go in zip(xs, right, strict=True)]
        (sum(losses) / comm.size).backward()
        twin_optimizer.step()
    model.finalize()
    assert_same_parameters(module, twin)  # weight decay did not move `never`
    assert module.never.weight.grad is None
    assert_replicas_equal(module)


@both
@both_modes
def test_what_the_loss_alone_uses_is_averaged(blocking):
    comm = world()
    x = torch.ones(3, 4).double()

    def loss(net, inside, rank):
        # Backward takes the newest first: on rank 0 the gradient of `never` comes last.
        older = inside.never.weight.square().sum() if rank == 0 else 0
        out = loss_of(net(x, rank > 0))
        return out + older + (inside.never.weight.exp().sum() if rank > 0 else 0)

    module, twin = built(Branches)
    model, optimizer = wrapped(module, blocking, bucket_mb=0.0001)
    optimizer.zero_grad(set_to_none=True)
    loss(model, module, comm.rank).backward()
    (sum(loss(twin, twin, rank) for rank in range(comm.size)) / comm.size).backward()
    model.finalize()
    assert_same_gradients(module, twin)


@both
def test_an_unused_gradient_keeps_what_it_held():
    module, _ = built(Branches)
    model, _ = wrapped(module, True)
    module.never.weight.grad = kept = torch.full_like(module.never.weight, 3.0)
    for _ in range(2):
        loss_of(model(torch.ones(2, 4).double(), False)).backward()
        assert torch.equal(module.never.weight.grad, torch.full_like(kept, 3.0))
    assert module.right.weight.grad is None


@both
@both_modes
def test_sparse_embeddings_are_averaged(blocking):
    comm = world()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(10, 3, sparse=True), nn.Linear(3, 2)).double()
    twin = copy.deepcopy(module)
    optimizer = DataParallelOptimizer(torch.optim.SGD(module.parameters(), lr=0.1))
    twin_optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    model = DataParallel(module, None, optimizer, blocking)
    words = torch.arange(3 * comm.size).view(comm.size, 3) % 7
    for _ in range(3):
        one_step(model, optimizer, words[comm.rank], set_to_none=True)
        assert module[0].weight.grad.is_sparse
        one_step(twin, twin_optimizer, words.view(-1))
    model.finalize()
    assert_same_parameters(module, twin)


@both
def test_a_sparse_gradient_that_was_cleared_does_not_count_as_used():
    module = nn.ModuleDict({"words": nn.Embedding(10, 3, sparse=True), "out": nn.Linear(3, 2)})
    model = DataParallel(Chosen(module))
    with model.no_sync():
        model(torch.arange(3), True).sum().backward()
    model.zero_grad()
    model(torch.arange(3), False).sum().backward()
    assert module["words"].weight.grad is None


class Chosen(nn.Module):
    """Reads words, or not."""

    def __init__(self, parts):
        super().__init__()
        self.parts = parts

    def forward(self, words, reads):
        x = self.parts["words"](words) if reads else torch.ones(len(words), 3)
        return self.parts["out"](x)


class Checkpointed(nn.Module):
    """A layer used in two reentrant segments and outside: three gradients in one backward."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(6, 6)
        self.wide = nn.Linear(6, 6000)
        self.narrow = nn.Linear(6000, 6)

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(lambda y: torch.tanh(self.shared(y)), x, use_reentrant=True)
            x = checkpoint(lambda y: torch.tanh(self.narrow(self.wide(y))), x, use_reentrant=True)
        return self.shared(x)


@both
@both_modes
def test_reentrant_checkpoints_reduce_every_gradient(blocking):
    module, twin = built(Checkpointed)
    model, optimizer = wrapped(module, blocking, lr=0.01, bucket_mb=0.0001)
    twin_optimizer = sgd(twin, lr=0.01)
    for step in range(2):
        everything, mine = batch((6,), step)
        one_step(model, optimizer, mine.requires_grad_(), set_to_none=step == 0)
        one_step(twin, twin_optimizer, everything.requires_grad_(), set_to_none=step == 0)
    model.finalize()
    assert_same_parameters(module, twin, rtol=1e-11)


@both
@both_modes
def test_a_forward_that_a_checkpoint_repeats_leaves_the_backward_alone(blocking):
    for reentrant in (True, False):
        module, twin = built(mlp)
        model, optimizer = wrapped(module, blocking, bucket_mb=0.0001)
        optimizer.zero_grad()
        everything, mine = batch((6,))
        for one, x in ((model, mine), (twin, everything)):
            x = x.clone().requires_grad_()
            # Backward is in the second forward, with buckets under way, when it repeats the first.
            first = checkpoint(one, x, use_reentrant=reentrant)
            (loss_of(first) + loss_of(one(2 * x))).backward()
        model.finalize()
        assert_same_gradients(module, twin)


@both
def test_forces_as_second_derivatives_train_in_parallel():
    """`autograd.grad` inside the loss must neither synchronise nor end a backward."""
    module, twin = built(mlp)
    model = DataParallel(module)
    everything, mine = batch((6,))
    for one, x in ((model, mine), (twin, everything)):
        x = x.clone().requires_grad_()
        (force,) = torch.autograd.grad(one(x).sum(), x, create_graph=True)
        force.square().mean().backward()
    assert_same_gradients(module, twin)
    assert model.stats().steps == 1


class ReturnsParameter(nn.Linear):
    def forward(self, x):
        return super().forward(x), self.bias


@pytest.mark.ranks(2, timeout=60)
def test_a_parameter_among_the_outputs_gathers_no_hooks():
    module, twin = built(lambda: ReturnsParameter(6, 3))
    model = DataParallel(module)
    everything, mine = batch((6,))
    for number in range(4):
        for one, x in ((model, mine), (twin, everything)):
            one.zero_grad()
            out, bias = one(x)
            (loss_of(out) + bias.square().sum()).backward()
        assert_same_gradients(module, twin)
        if number == 0:
            before = len(module.bias._backward_hooks)
    assert len(module.bias._backward_hooks) == before
