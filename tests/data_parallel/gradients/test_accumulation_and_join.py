"""`no_sync`, `samples` and `join`: accumulated gradients and uneven data."""

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
    both,
    both_modes,
    built,
    loss_of,
    mlp,
    one_step,
    sgd,
    wrapped,
)
from tests.repeated import repeated
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks

from unisono.comm import world
from unisono.data_parallel import DataParallel, DataParallelOptimizer


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
    with pytest.raises(ValueError, match=r"(?s)rank 1: 2 batches, lr .*model.join\(scheduler"):
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
