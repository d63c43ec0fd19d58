"""A rank that fails ends all ranks with one error, and nothing is left behind."""

from __future__ import annotations

import contextlib
import gc
import time
from pathlib import Path

import pytest
import torch
from parallel_models import batch, built, loss_of, mlp
from tests.waiting import answered, scaled_by_load, wait_until_answered

import unisono
from unisono.comm import world
from unisono.data_parallel import DataParallel, DataParallelOptimizer
from unisono.errors import CollectiveMismatch, RankFailed, RankTimeout


def train_with_a_failure(where):
    module, _ = built(mlp)
    optimizer = DataParallelOptimizer(torch.optim.SGD(module.parameters(), lr=0.1))
    model = DataParallel(module, None, optimizer)
    for step in range(4):
        failing = step == 2 and world().rank == 1
        if failing and where == "forward":
            module[2].register_forward_hook(lambda *_: 1 / 0)
        optimizer.zero_grad()
        out = model(batch((6,), step)[1])
        if failing and where == "backward":
            out.register_hook(lambda grad: 1 / 0)
        loss_of(out).backward()
        optimizer.step()
        if failing and where == "between":
            raise ZeroDivisionError("between step and forward")
    model.eval()


@pytest.mark.parametrize("where", ["forward", "backward", "between"])
def test_a_rank_that_raises_ends_all_with_its_own_error(where, monkeypatch):
    monkeypatch.setenv("UNISONO_TIMEOUT_S", "60")
    with pytest.raises((ZeroDivisionError, RankFailed)) as caught:
        unisono.run(train_with_a_failure, where, ranks=2, logs=unisono.Logs(console="none"))
    assert isinstance(caught.value, ZeroDivisionError) or "ZeroDivision" in str(caught.value)


@pytest.mark.ranks(2, backend=["gloo", "shm"], timeout=40)
def test_a_missing_rank_is_reported_with_the_bucket(tmp_path):
    module, _ = built(mlp)
    model = DataParallel(module, world(timeout_s=1.0))
    out = model(batch((6,))[1])
    if world().rank == 0:
        with pytest.raises(RankTimeout, match=r"gradient bucket 0 .*4\.bias, 4\.weight") as caught:
            loss_of(out).backward()
        assert caught.value.missing == (1,)
        answered(tmp_path)
    else:
        wait_until_answered(tmp_path, 0)


@pytest.mark.ranks(2, backend="shm", timeout=40)
def test_samples_on_one_rank_only_are_named_at_once():
    # A bucket of one element and its flag: as many bytes, of the same dtype, as a rank's weight.
    model = DataParallel(torch.nn.Linear(1, 1, bias=False).double(), world(timeout_s=20.0))
    loss = model(torch.ones(2, 1).double()).mean()
    mine = model.samples(2) if world().rank == 0 else contextlib.nullcontext()
    started = time.monotonic()
    with pytest.raises(CollectiveMismatch, match=r"HINT: samples\(\) and join\(\)") as caught, mine:
        loss.backward()
    assert time.monotonic() - started < scaled_by_load(15)
    what = "weights of this backward" if world().rank == 0 else "gradient bucket 0"
    assert str(caught.value).startswith(what)
    assert set(caught.value.calls) == {0, 1}


def on_rank_0_only(what, directory):
    model = DataParallel(torch.nn.Linear(1, 1, bias=False).double())
    mine = {"samples": lambda: model.samples(2), "join": model.join}[what]
    try:
        with mine() if world().rank == 0 else contextlib.nullcontext():
            model(torch.ones(2, 1).double()).mean().backward()
    except CollectiveMismatch as error:
        (directory / str(world().rank)).write_text(str(error))
        while not all((directory / name).exists() for name in "01"):
            time.sleep(0.05)
        raise


@pytest.mark.parametrize("what", ["samples", "join"])
def test_samples_or_join_on_one_rank_only_is_named_over_gloo_too(what, tmp_path, monkeypatch):
    monkeypatch.setenv("UNISONO_BACKEND", "gloo")
    quiet = unisono.Logs(console="none")
    with pytest.raises(RankFailed) as caught:
        unisono.run(on_rank_0_only, what, tmp_path, ranks=2, logs=quiet)
    assert isinstance(caught.value.exception, CollectiveMismatch)
    told = [(tmp_path / name).read_text() for name in "01"]
    assert f"from {what}()" in told[0].replace("samples() or join()", "samples()")
    assert told[1].startswith("gradient bucket 0")
    for text in told:
        assert "rank 0: all_gather" in text
        assert "rank 1: all_reduce(" in text
        assert "HINT: samples() and join() go around the same backwards on all" in text


def train_unequally(has_buffers):
    layers = [torch.nn.BatchNorm1d(6)] if has_buffers else []
    model = DataParallel(torch.nn.Sequential(*layers, torch.nn.Linear(6, 3)).double())
    for step in range(3 - world().rank):
        loss_of(model(batch((6,), step)[1])).backward()


@pytest.mark.parametrize(("backend", "has_buffers"), [("gloo", False), ("shm", True)])
def test_ranks_that_run_out_of_batches_are_named_long_before_the_deadline(
    backend, has_buffers, monkeypatch
):
    monkeypatch.setenv("UNISONO_BACKEND", backend)
    with pytest.raises(RankFailed) as caught:
        unisono.run(train_unequally, has_buffers, ranks=2, logs=unisono.Logs(console="none"))
    error = caught.value.exception
    assert isinstance(error, CollectiveMismatch)
    assert error.returned[1]["averaged backwards"] == 2
    assert "rank 1 has finished: 2 averaged backwards" in str(error)
    assert "drop_last=True" in str(error)
    assert "join()" in str(error)


@pytest.mark.ranks(2, backend="shm", timeout=40)
def test_memory_and_hooks_go_with_the_model():
    def segments():
        return sum("unisono" in line for line in Path("/proc/self/maps").read_text().splitlines())

    before = segments()
    module, _ = built(mlp)
    optimizer = DataParallelOptimizer(torch.optim.SGD(module.parameters(), lr=0.1))
    model = DataParallel(module, None, optimizer, True)
    loss_of(model(batch((6,))[1])).backward()
    assert segments() > before
    del model
    optimizer.zero_grad(set_to_none=True)
    gc.collect()
    world().barrier()
    assert segments() == before
    assert all(not p._post_accumulate_grad_hooks for p in module.parameters())
