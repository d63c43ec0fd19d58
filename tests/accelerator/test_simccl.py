"""The backend behaves as NCCL's does: streams wait for it, not the host."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from tests.accelerator.ranks import BOTH, TORCHS, device_ranks, own_device

from unisono import torch_private as private

pytestmark = device_ranks(2, backend=TORCHS)


# -- verbs ---------------------------------------------------------------------------------------


@device_ranks([1, 2, 3], backend=BOTH)
def test_reductions_give_the_numbers_of_gloo(schedule):
    device, rank, size = own_device(), dist.get_rank(), dist.get_world_size()
    operations = dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT
    for dtype in (torch.float64, torch.int32, torch.bfloat16):
        x = torch.arange(6).to(dtype) + rank + 1
        for op in operations:
            ours, theirs = x.to(device), x.clone()
            dist.all_reduce(ours, op)
            dist.all_reduce(theirs, op)
            assert torch.equal(ours.cpu(), theirs)
    mean = torch.full((3,), rank + 1.0, device=device)
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    assert mean.tolist() == [(size + 1) / 2] * 3
    at_root = torch.full((3,), rank + 1.0, device=device)
    dist.reduce(at_root, size - 1)
    total = size * (size + 1) / 2
    assert at_root.tolist() == [total if rank == size - 1 else rank + 1.0] * 3
    blocks = torch.arange(2.0 * size, device=device) + rank
    block = torch.empty(2, device=device)
    private.reduce_scatter_single(block, blocks)
    others = size * (size - 1) / 2
    assert block.tolist() == [size * 2 * rank + others, size * (2 * rank + 1) + others]
    listed = torch.empty(2, device=device)
    dist.reduce_scatter(listed, list(blocks.chunk(size)))
    assert torch.equal(block, listed)


@device_ranks([1, 2, 3], backend=[*BOTH, "shm"])
def test_copies_go_where_they_should(schedule):
    device, rank, size = own_device(), dist.get_rank(), dist.get_world_size()
    x = torch.full((2,), float(rank), device=device)
    dist.broadcast(x, size - 1)
    assert x.tolist() == [size - 1.0] * 2
    joined, x = torch.empty(2 * size, device=device), torch.full((2,), float(rank), device=device)
    private.all_gather_single(joined, x)
    assert joined.tolist() == [float(r) for r in range(size) for _ in range(2)]
    uneven = [torch.empty(r, device=device) for r in range(size)]
    dist.all_gather(uneven, torch.full((rank,), float(rank), device=device))
    assert [block.tolist() for block in uneven] == [[float(r)] * r for r in range(size)]
    sent = torch.arange(size * 2.0, device=device) + 10 * rank
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    expected = [2.0 * rank + i + 10 * r for r in range(size) for i in range(2)]
    assert received.tolist() == expected
    listed = list(torch.empty_like(sent).chunk(size))
    dist.all_to_all(listed, list(sent.chunk(size)))
    assert torch.cat(listed).tolist() == expected
    gathered = [torch.empty(2, device=device) for _ in range(size)] if rank == 0 else None
    dist.gather(x, gathered)
    if gathered is not None:
        assert torch.cat(gathered).tolist() == joined.tolist()
    dist.scatter(x, list(sent.chunk(size)) if rank == 0 else None)
    assert x.tolist() == [2.0 * rank, 2.0 * rank + 1]


@device_ranks(2, backend=BOTH)
def test_messages_of_one_batch_may_cross(schedule):
    device, other = own_device(), 1 - dist.get_rank()
    large = torch.full((1 << 20,), float(other), device=device)
    received = torch.empty_like(large), torch.empty(3, device=device)
    sends = large, torch.arange(3.0, device=device)
    operations = [dist.P2POp(dist.isend, x, other) for x in sends]
    operations += [dist.P2POp(dist.irecv, x, other) for x in received]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert received[0].eq(1.0 - other).all().item()
    assert received[1].tolist() == [0.0, 1.0, 2.0]


def test_sends_that_cross_one_by_one_never_complete():
    device, other = own_device(), 1 - dist.get_rank()
    sent = dist.isend(torch.ones(3, device=device), other)
    dist.irecv(torch.empty(3, device=device), other)
    with pytest.raises(dist.DistBackendError, match="SEND ran for more than 200 milliseconds"):
        sent.wait(datetime.timedelta(seconds=0.2))


@device_ranks(3, backend=BOTH)
def test_groups_of_some_ranks_work_beside_the_world(schedule):
    device, rank = own_device(), dist.get_rank()
    pair = dist.new_group([0, 2], backend="simccl")
    x = torch.ones(2, device=device)
    if rank != 1:
        dist.all_reduce(x, group=pair)
    dist.all_reduce(x)
    assert x.tolist() == [5.0] * 2


def test_the_backend_is_the_one_of_the_device():
    assert dist.Backend.default_device_backend_map["sim"] == "simccl"
    assert dist.get_default_backend_for_device("sim") == "simccl"
    everything = dist.new_group()
    assert everything._get_backend(torch.device("sim")).name() == "simccl"
    x = torch.ones(2, device=own_device())
    dist.all_reduce(x, group=everything)
    assert x.tolist() == [2.0] * 2


def test_what_nccl_refuses_is_refused():
    device = own_device()
    group = dist.new_group(backend="simccl")
    with pytest.raises(RuntimeError, match="contiguous"):
        dist.all_reduce(torch.ones(4, 4, device=device).t()[:2], group=group)
    with pytest.raises(RuntimeError, match="ReduceOp"):
        dist.all_reduce(torch.ones(4, device=device, dtype=torch.int), dist.ReduceOp.BXOR, group)
    with pytest.raises(RuntimeError, match="5 elements is not 2 times one of 2"):
        private.all_gather_single(torch.ones(5, device=device), torch.ones(2, device=device), group)
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(4), group=group)


# -- waits ---------------------------------------------------------------------------------------


def test_results_are_not_there_before_a_wait():
    import simdev

    x = torch.full((4,), dist.get_rank() + 1.0, device=own_device())
    torch.accelerator.synchronize()
    with simdev.patience(side_streams_s=5.0):
        work = dist.all_reduce(x, async_op=True)
        assert x.tolist() == [dist.get_rank() + 1.0] * 4
        work.wait()  # the stream waits
        assert x.tolist() == [3.0] * 4


def test_wait_and_is_completed_do_not_block_the_host():
    import simdev

    x = torch.ones(4, device=own_device())
    simdev._C.put_sleep(0.5)
    with simdev.counters() as counted:
        begin = time.monotonic()
        work = dist.all_reduce(x, async_op=True)
        assert not work.is_completed()
        work.wait()
        y = x * 2
        assert not work.is_completed()
        assert time.monotonic() - begin < 0.4
    assert counted.syncs == {}
    assert y.tolist() == [4.0] * 4
    assert work.is_completed()


def test_barriers_block_the_host_and_are_counted():
    import simdev

    group, index = dist.new_group(backend="simccl"), own_device().index
    with simdev.counters() as counted:
        dist.barrier(group=group, device_ids=[index])
    assert counted.syncs == {"barrier": 1}


def test_futures_run_callbacks_on_a_stream_that_has_waited(schedule):
    x = torch.full((4,), dist.get_rank() + 1.0, device=own_device())
    future = dist.all_reduce(x, async_op=True).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2)
    assert doubled.wait().tolist() == [6.0] * 4


def test_memory_of_a_tensor_that_was_dropped_is_not_used_again_too_early(schedule):
    device = own_device()
    if dist.get_rank() == 0:
        dist.broadcast(torch.ones(256, device=device), 0, async_op=True)
        torch.full((256,), 5.0, device=device).sum().item()  # would get the memory
    else:
        x = torch.empty(256, device=device)
        dist.broadcast(x, 0)
        assert x.eq(1).all().item()


# -- time limits, aborts, ranks that are missing -------------------------------------------------


def test_a_wait_with_a_timeout_blocks_the_host_and_loses_the_group():
    """As ProcessGroupNCCL::WorkNCCL::wait does, also when only an earlier kernel is slow."""
    import simdev

    device = own_device()
    group = dist.new_group(backend="simccl")
    x = torch.ones(4, device=device)
    in_time = dist.all_reduce(x, group=group, async_op=True)
    with simdev.counters() as counted:
        in_time.wait(datetime.timedelta(seconds=10))
    assert counted.syncs == {"work.wait(timeout)": 1}
    simdev._C.put_sleep(0.5)
    work = dist.all_reduce(x, group=group, async_op=True)
    with pytest.raises(dist.DistBackendError, match="timeout"):
        work.wait(datetime.timedelta(seconds=0.1))
    with pytest.raises(dist.DistBackendError, match="aborted"):
        dist.all_reduce(x, group=group)
    dist.all_reduce(x)  # other groups go on


def abort_by_backend(group):
    group.abort()


def abort_by_torch(group):
    dist.distributed_c10d._abort_process_group(group)


@pytest.mark.parametrize("abort", [abort_by_backend, abort_by_torch])
def test_abort_releases_the_stream_of_a_collective_whose_ranks_never_come(abort):
    device, rank = own_device(), dist.get_rank()
    group = dist.new_group(backend="simccl")
    x = torch.ones(4, device=device)
    if rank == 0:
        work = dist.all_reduce(x, group=group, async_op=True)
        work.wait()
        last = (x * 2).sum()
        time.sleep(0.2)
        assert not work.is_completed()
        begin = time.monotonic()
        abort(group)
        last.item()
        assert time.monotonic() - begin < 1
        assert work.is_completed()
        assert "aborted" in str(work.exception())
    dist.all_reduce(x)  # the other rank waits here, and other groups go on
    assert x[0].item() == 2


def test_the_time_limit_of_the_group_ends_a_collective_whose_ranks_never_come():
    device = own_device()
    limit = datetime.timedelta(seconds=0.3)
    group = dist.new_group(backend="simccl", timeout=limit)
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.ones(4, device=device), group=group, async_op=True)
        with pytest.raises(RuntimeError, match="watchdog caught collective operation timeout"):
            torch.accelerator.synchronize()
        assert "timeout" in str(work.exception())
    dist.barrier()


def test_tensors_of_different_sizes_are_an_error_and_no_hang():
    device = own_device()
    group = dist.new_group(backend="simccl")
    dist.all_reduce(torch.ones(3 + dist.get_rank(), device=device), group=group)
    with pytest.raises(RuntimeError, match=r"sends (12|16) bytes"):
        torch.accelerator.synchronize()


def test_groups_and_streams_leave_nothing_behind(hygiene):
    x = torch.ones(4, device=own_device())
    for _ in range(2):
        dist.all_reduce(x, group=dist.new_group(backend="simccl"))
    assert x.tolist() == [4.0] * 4


@device_ranks(1, backend=TORCHS, timeout=100)
def test_a_process_ends_although_a_collective_waits_for_ever(device_path, tmp_path):
    text = """
import os, torch, torch.distributed as dist
rank = int(os.environ["RANK"])
store = dist.FileStore(os.environ["STORE"], 2)
dist.init_process_group("sim:simccl", store=store, rank=rank, world_size=2)
if rank == 0:
    dist.all_reduce(torch.ones(2, device="sim"))
"""
    environ = {**os.environ, "PYTHONPATH": str(device_path), "STORE": str(tmp_path / "store")}
    words = [sys.executable, "-W", "ignore", "-c", text]
    ranks = [subprocess.Popen(words, env={**environ, "RANK": rank}) for rank in "01"]
    assert [rank.wait(90) for rank in ranks] == [0, 0]
