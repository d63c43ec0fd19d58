"""Unused, sparse, checkpointed and accumulated gradients; samples and uneven data."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from parallel_models import (
    assert_replicas_equal,
    assert_same_gradients,
    assert_same_parameters,
    batch,
    built,
    loss_of,
    mlp,
    one_step,
)
from tests.repeated import repeated
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.utils.checkpoint import checkpoint

from unisono.comm import world
from unisono.data_parallel import DataParallel, DataParallelOptimizer

both_modes = repeated("blocking", [True, False])
both = pytest.mark.ranks(3, backend=["gloo", "shm"], timeout=60)


class Branches(nn.Module):
    """Which layer is used depends on the input's first number; `never` is not used at all."""

    def __init__(self):
        super().__init__()
        self.left = nn.Linear(4, 2)
        self.right = nn.Linear(4, 2)
        self.never = nn.Linear(4, 2)

    def forward(self, x, right):
        return self.right(x) if right else self.left(x)


def sgd(module, lr=0.1):
    return torch.optim.SGD(module.parameters(), lr=lr, momentum=0.9, weight_decay=0.1)


def wrapped(module, blocking, lr=0.1, **options):
    optimizer = DataParallelOptimizer(sgd(module, lr))
    return DataParallel(module, None, optimizer, blocking, **options), optimizer


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
@both_modes
def test_no_sync_averages_the_sum_and_two_backwards_add_two_means(blocking):
    for accumulate in (True, False):
        module, twin = built(mlp)
        model, optimizer = wrapped(module, blocking)
        optimizer.zero_grad()
        for step in range(3):
            everything, mine = batch((6,), step)
            loss_of(twin(everything)).backward()
            if accumulate and step < 2:
                with model.no_sync():
                    loss_of(model(mine)).backward()
                assert not world().all_equal(module[0].weight.grad)
            else:
                loss_of(model(mine)).backward()
        model.finalize()
        assert_same_gradients(module, twin)


@pytest.mark.ranks([1, 3], backend=["gloo", "shm"], timeout=60)
@both_modes
def test_samples_weight_every_rank_by_what_it_has_seen(blocking):
    comm = world()
    counts = [[3, 0, 2][: comm.size], [1, 4, 2][: comm.size], [2, 2, 5][: comm.size]]
    xs = torch.randn(40, 6, generator=torch.Generator().manual_seed(5)).double()

    def parts(step):
        begin = sum(sum(c) for c in counts[:step]) + sum(counts[step][: comm.rank])
        return xs[begin : begin + counts[step][comm.rank]]

    module, twin = built(mlp)

    def loss(out):  # of no rows: as a mean of nothing is, and it counts nothing
        return loss_of(out) if len(out) else out.sum() + torch.nan * module[0].weight.sum()

    model, optimizer = wrapped(module, blocking)
    for step in range(3):  # each synchronises by itself
        optimizer.zero_grad()
        with model.samples(counts[step][comm.rank]):
            loss(model(parts(step))).backward()
        model.finalize()
        begin = sum(sum(c) for c in counts[:step])
        twin.zero_grad()
        loss_of(twin(xs[begin : begin + sum(counts[step])])).backward()
        assert_same_gradients(module, twin)
    optimizer.zero_grad()
    for step in range(2):  # accumulated, in both orders of nesting
        if step == 0:
            with model.no_sync(), model.samples(counts[0][comm.rank]):
                loss(model(parts(0))).backward()
        else:
            with model.samples(counts[1][comm.rank]), model.no_sync():
                loss(model(parts(1))).backward()
    with model.samples(counts[2][comm.rank]):
        loss(model(parts(2))).backward()
    model.finalize()
    twin.zero_grad()
    loss_of(twin(xs[: sum(map(sum, counts))])).backward()
    assert_same_gradients(module, twin)


@pytest.mark.ranks([1, 3], timeout=60)
@both_modes
@repeated("set_to_none", [True, False])
@repeated("by_torch", [True, False])
def test_samples_of_an_accumulation_that_was_given_up_do_not_count(blocking, set_to_none, by_torch):
    module, twin = built(mlp)
    model, optimizer = wrapped(module, blocking)
    with model.no_sync(), model.samples(torch.tensor(4)):
        loss_of(model(batch((6,))[1])).backward()
    (optimizer.torch_optimizer if by_torch else optimizer).zero_grad(set_to_none=set_to_none)
    counts = [1, 3, 2][: world().size]
    rows = batch((6,), 1)[0].split(4)
    with model.samples(counts[world().rank]):
        loss_of(model(rows[world().rank][: counts[world().rank]])).backward()
    model.finalize()
    loss_of(twin(torch.cat([x[:n] for x, n in zip(rows, counts, strict=True)]))).backward()
    assert_same_gradients(module, twin)
    with model.no_sync(), model.samples(4):
        optimizer.zero_grad(set_to_none=set_to_none)  # begins one, though inside the block
        loss_of(model(batch((6,))[1])).backward()
    with model.samples(4):
        loss_of(model(batch((6,), 1)[1])).backward()
    model.finalize()
    twin.zero_grad()
    loss_of(twin(torch.cat([batch((6,), step)[0] for step in range(2)]))).backward()
    assert_same_gradients(module, twin)


@both
def test_samples_of_a_gradient_of_zeros_count():
    module, twin = built(mlp)
    model, _ = wrapped(module, True)
    everything, mine = batch((6,))
    with model.no_sync(), model.samples(4):
        (0 * model(mine).sum()).backward()
    with model.samples(4):
        loss_of(model(mine)).backward()
    (loss_of(twin(everything)) / 2).backward()
    assert_same_gradients(module, twin)


@pytest.mark.ranks([1, 3], backend=["gloo", "shm"], timeout=60)
@both_modes
def test_join_goes_on_among_the_ranks_that_have_data(blocking):
    comm = world()
    module = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    for extra in range(4):
        for divide_by in ("active", "world")[extra % 2 :]:
            torch.manual_seed(0)
            for layer in (module[0], module[2]):
                layer.reset_parameters()
            twin = copy.deepcopy(module)
            for model_part in (module, twin):
                model_part[1].eval()
            model, optimizer = wrapped(module, blocking)
            twin_optimizer = sgd(twin)
            lengths = [1 + extra * r for r in range(comm.size)]
            data = [
                torch.randn(9, 3, 6, generator=torch.Generator().manual_seed(r)).double()
                for r in range(comm.size)
            ]
            with model.join(divide_by=divide_by):
                for i in range(lengths[comm.rank]):
                    optimizer.zero_grad()
                    loss_of(model(data[comm.rank][i])).backward()
                    optimizer.step()
            model.finalize()
            assert_replicas_equal(module)
            for i in range(max(lengths) if comm.rank == 0 else 0):
                losses = [loss_of(twin(d[i])) for d, n in zip(data, lengths, strict=True) if i < n]
                twin_optimizer.zero_grad()
                (sum(losses) / (len(losses) if divide_by == "active" else comm.size)).backward()
                twin_optimizer.step()
            if comm.rank == 0:
                assert_same_parameters(module, twin)
            state = optimizer.state_dict()["state"]
            assert comm.all_equal(state[0]["momentum_buffer"])
            del model  # a module has one wrapper at a time


@pytest.mark.ranks(2, backend=["gloo", "shm"], timeout=60)
def test_join_nests_with_no_sync_and_samples():
    comm = world()
    module, twin = built(mlp)
    model, optimizer = wrapped(module, True)
    lengths = [2, 6]
    with model.join():
        for i in range(lengths[comm.rank]):
            x = batch((6,), i)[1]
            if i % 2 == 0:
                optimizer.zero_grad()
                with model.no_sync(), model.samples(4):
                    loss_of(model(x)).backward()
            else:
                with model.samples(4):
                    loss_of(model(x)).backward()
                optimizer.step()
    twin_optimizer = sgd(twin)
    for i in range(0, 6, 2):
        active = slice(0, None) if i < 2 else slice(4, None)
        one_step(twin, twin_optimizer, torch.cat([batch((6,), j)[0][active] for j in (i, i + 1)]))
    assert_same_parameters(module, twin)


JOINED = [4, 2, 3]
"""Batches of each rank, uneven."""


def joined_epoch(model, optimizer, scheduler, epoch, lengths, *named):
    """Train one epoch of a rank; the batches of all ranks are those of `twin_epoch`."""
    comm = world()
    with model.join(*named):
        for i in range(lengths[comm.rank]):
            optimizer.zero_grad()
            loss_of(model(batch((6,), 10 * epoch + i)[1])).backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()


def twin_epoch(twin, optimizer, scheduler, epoch, lengths):
    for i in range(max(lengths)):
        everything = batch((6,), 10 * epoch + i)[0].chunk(world().size)
        losses = [loss_of(twin(x)) for x, n in zip(everything, lengths, strict=True) if i < n]
        optimizer.zero_grad()
        (sum(losses) / len(losses)).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def scheduled(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=40)


@both
@repeated("kind", ["plain", "blocking", "non-blocking"])
@repeated("schedules", [False, True])
def test_join_brings_optimizers_and_schedulers_together(kind, schedules):
    """A rank that ran out goes on in the second epoch as if it had made every step."""
    lengths = JOINED[: world().size]
    module, twin = built(mlp)
    inner = torch.optim.Adam(module.parameters(), lr=0.01)
    optimizer = inner if kind == "plain" else DataParallelOptimizer(inner)
    attached = None if kind == "plain" else optimizer
    model = DataParallel(module, None, attached, kind == "blocking", bucket_mb=0.001)
    twin_optimizer = torch.optim.Adam(twin.parameters(), lr=0.01)
    scheduler = scheduled(optimizer) if schedules else None
    twin_scheduler = scheduled(twin_optimizer) if schedules else None
    for epoch in range(3):
        named = [scheduler] if schedules else []
        joined_epoch(model, optimizer, scheduler, epoch, lengths, *named)
        twin_epoch(twin, twin_optimizer, twin_scheduler, epoch, lengths)
        if schedules:
            assert scheduler.last_epoch == twin_scheduler.last_epoch
        assert inner.param_groups[0]["lr"] == twin_optimizer.param_groups[0]["lr"]
    model.finalize()
    assert_replicas_equal(module)
    assert_same_parameters(module, twin, rtol=1e-10)
    assert inner.state[module[0].weight]["step"] == 3 * max(lengths)
    assert not _global_optimizer_post_hooks  # nothing is left behind


@pytest.mark.ranks(2, backend=["gloo", "shm"], timeout=60)
def test_join_refuses_what_it_cannot_bring_together():
    comm = world()
    module, _ = built(mlp)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    model = DataParallel(module)
    with pytest.raises(TypeError, match=r"(?s)without state_dict.*HINT: join\(optimizer"):
        joined_epoch(model, optimizer, None, 0, [1, 1], [optimizer])
    with pytest.raises(ValueError, match=r"(?s)rank 0: 0 batches, -.*rank 1: 2 batches, Adam of 6"):
        joined_epoch(model, optimizer, None, 0, [0, 2])
    joined_epoch(model, optimizer, None, 0, [0, 2], optimizer)
    assert comm.all_equal(optimizer.state[module[0].weight]["exp_avg"])
    scheduler = scheduled(optimizer)
    with pytest.raises(ValueError, match=r"(?s)rank 1: 2 batches, learning.*model.join\(scheduler"):
        joined_epoch(model, optimizer, scheduler, 1, [1, 2])
    joined_epoch(model, optimizer, scheduler, 1, [2, 1], scheduler)
    joined_epoch(model, optimizer, scheduler, 1, [1, 1])  # all alike: nothing to bring together
    assert len(set(comm.all_gather_object(scheduler.last_epoch))) == 1


@pytest.mark.ranks(2, backend=["gloo", "shm"], timeout=60)
@both_modes
@repeated("counts", [False, True])
def test_a_rank_that_runs_out_while_it_accumulates_loses_nothing(blocking, counts):
    comm = world()
    module, twin = built(mlp)
    model, optimizer = wrapped(module, blocking)
    lengths, sizes = [3, 6], [4, 2]
    xs = [[batch((6,), i, local=8)[0][r * 8 :][: sizes[r]] for i in range(6)] for r in range(2)]

    def backward(i):
        loss = loss_of(model(xs[comm.rank][i]))
        with model.samples(sizes[comm.rank]) if counts else contextlib.nullcontext():
            loss.backward()

    with model.join():
        for i in range(lengths[comm.rank]):
            if i % 2 == 0:
                optimizer.zero_grad()
                with model.no_sync():
                    backward(i)
            else:
                backward(i)
                optimizer.step()
    model.finalize()
    twin_optimizer = sgd(twin)
    for i in range(0, 6, 2):
        mine = [xs[r][i : min(i + 2, lengths[r])] for r in range(2)]
        twin_optimizer.zero_grad()
        if counts:
            loss_of(twin(torch.cat([x for part in mine for x in part]))).backward()
        else:
            sums = [sum(loss_of(twin(x)) for x in part) for part in mine if part]
            (sum(sums) / len(sums)).backward()
        twin_optimizer.step()
    assert_same_parameters(module, twin)
    assert_replicas_equal(module)


@pytest.mark.ranks(2, backend=["gloo", "shm"], timeout=60)
def test_what_all_ranks_have_accumulated_at_the_end_of_join_stays():
    comm = world()
    module, twin = built(mlp)
    model, _ = wrapped(module, True)
    with model.join():
        for i in range(1 + comm.rank):
            with model.no_sync():
                loss_of(model(batch((6,), i)[1])).backward()
    for i in range(1 + comm.rank):
        loss_of(twin(batch((6,), i)[1])).backward()
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
