"""Calls that torch makes on a shm group, seen by trace and by check mode; other devices."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from unisono.comm import check, post_failure, trace
from unisono.errors import CollectiveMismatch, PartitionError, RankFailed, UnisonoError


@pytest.mark.ranks(2, backend="shm")
def test_calls_of_torch_are_traced_with_bytes_waits_and_source_lines():
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(10, 10))
    with trace() as t:
        if dist.get_rank() == 0:
            torch.zeros(1).add_(1)
        else:
            time.sleep(0.1)
        dist.all_reduce(torch.ones(100))
        model(torch.ones(1, 10)).sum().backward()
    blocking, of_ddp = [e for e in t.events if e.op == "all_reduce"]
    assert (blocking.sent, blocking.received, blocking.dtype) == (400, 400, "float32")
    assert blocking.algorithm == "shm"
    assert not blocking.is_async
    assert "test_observed.py" in blocking.site
    assert blocking.t_end - blocking.t_start >= blocking.wait_ns
    if dist.get_rank() == 0:  # waited for the other
        assert blocking.wait_ns > 5e7
    assert of_ddp.is_async
    assert of_ddp.sent == 440
    assert "test_observed.py" in of_ddp.site


@pytest.mark.ranks(2, backend="shm")
def test_check_mode_names_source_lines_of_calls_that_differ():
    with check():
        dist.all_reduce(torch.ones(3))
        with pytest.raises(CollectiveMismatch, match=r"test_observed\.py") as caught:
            dist.all_reduce(torch.ones(3 + dist.get_rank()))
    assert "different shapes" in str(caught.value)


@pytest.mark.ranks(2, backend="shm")
def test_check_mode_lets_a_training_step_pass():
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    with check():
        model(torch.ones(1, 4)).sum().backward()
        outs = [torch.empty(2 + q) for q in range(2)]
        dist.all_gather(outs, torch.ones(2 + dist.get_rank()))
        dist.barrier()


@pytest.mark.ranks(2, backend="shm")
def test_tensors_of_other_devices_go_to_an_inner_group(monkeypatch):
    group = dist.group.WORLD
    with pytest.raises(UnisonoError, match="shm moves CPU tensors"):
        dist.all_reduce(torch.empty(3, device="meta"))
    # where torch has nccl, it is tried, and has words of its own
    with pytest.raises((UnisonoError, RuntimeError, ValueError), match=r"(?i)cuda|GPUs"):
        group.inner_group(torch.device("cuda"))

    class Inner:
        def allreduce(self, tensors, opts):
            return ("inner", tensors, opts)

    monkeypatch.setattr(type(group), "inner_group", lambda self, device: Inner())
    x = torch.empty(3, device="meta")
    options = dist.AllreduceOptions()
    assert group.allreduce([x], options) == ("inner", [x], options)


@pytest.mark.ranks(2, backend="shm")
def test_bad_arguments_are_refused_before_anything_is_sent():
    with pytest.raises(UnisonoError, match="only dense tensors"):
        dist.group.WORLD.broadcast([torch.eye(3).to_sparse()], dist.BroadcastOptions())
    with pytest.raises(PartitionError, match="5 % 2 = 1"):
        dist.group.WORLD.reduce_scatter_single(torch.empty(2), torch.ones(5))
    with pytest.raises(PartitionError, match="different sizes"):
        dist.group.WORLD.allgather([[torch.empty(3), torch.empty(4)]], [torch.empty(2)])
    with pytest.raises(PartitionError, match="split sizes"):
        dist.group.WORLD.all_to_all_single(torch.empty(4), torch.empty(4), [3, 3], [2, 2])
    x = torch.ones(2)
    dist.all_reduce(x)
    assert x.tolist() == [2.0, 2.0]


@pytest.mark.ranks(2, backend="shm")
def test_deadlines_come_from_the_call_the_environment_or_the_group(monkeypatch):
    options = dist.AllreduceOptions()
    plain = dist.new_group(backend="shm", timeout=timedelta(seconds=11))
    assert plain._timeout_s(options) == 11
    monkeypatch.setenv("UNISONO_TIMEOUT_S", "7")
    group = dist.new_group(backend="shm", timeout=timedelta(seconds=11))
    assert group._timeout_s(options) == 7
    options.timeout = timedelta(seconds=3)
    assert group._timeout_s(options) == 3
    for text in ("abc", "-1", "inf"):
        monkeypatch.setenv("UNISONO_TIMEOUT_S", text)
        with pytest.raises(
            UnisonoError, match=f"UNISONO_TIMEOUT_S='{text}'\n  found: not a number"
        ):
            dist.new_group(backend="shm")
    monkeypatch.setenv("UNISONO_TIMEOUT_S", "")
    group = dist.new_group(backend="shm", timeout=timedelta(seconds=11))
    assert group._timeout_s(dist.AllreduceOptions()) == 11
    dist.barrier(group=group)


@pytest.mark.ranks(2, backend="shm")
def test_a_failure_that_a_rank_has_posted_ends_the_wait_of_the_others():
    if dist.get_rank() == 1:
        post_failure(ValueError("lost its data"))
        time.sleep(1.5)
        return
    began = time.monotonic()
    with pytest.raises(RankFailed, match="lost its data") as caught:
        dist.barrier()
    assert caught.value.rank == 1
    assert time.monotonic() - began < 1.4
