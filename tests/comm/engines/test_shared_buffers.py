"""Tensors in the group's shared memory: collectives on them take no copies, and nothing is kept."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from unisono.comm import world
from unisono.comm.engines import core
from unisono.errors import CollectiveMismatch, UnisonoError

DEADLINE = {"async_op": False, "timeout_s": 20.0}
at_2_to_4 = pytest.mark.ranks([2, 3, 4], backend="shm")
N = 30_000
"""Elements (float32) that do not fit the path for small tensors."""


def mapped_segments():
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "unisono" in line]


def open_fds():
    return len(list(Path("/proc/self/fd").iterdir()))


def filled(buffer, rank):
    return buffer.copy_(torch.arange(buffer.numel()).view(buffer.shape) % 11 + rank)


def expected_sum(shape, size):
    n = torch.Size(shape).numel()
    return (torch.arange(n).view(shape) % 11 * size + sum(range(size))).float()


@at_2_to_4
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_reductions_on_a_buffer_and_on_its_views(dtype):
    engine = dist.group.WORLD.unisono_engine
    buffer = engine.shared_buffer((3, N), dtype, timeout_s=20.0)
    assert buffer.dtype == dtype
    assert torch.equal(buffer, torch.zeros(3, N, dtype=dtype))
    filled(buffer, engine.rank)
    engine.all_reduce_(buffer, "sum", **DEADLINE)
    assert torch.equal(buffer.float(), expected_sum((3, N), engine.size))
    filled(buffer, engine.rank)
    engine.all_reduce_(buffer[1], "sum", **DEADLINE)
    assert torch.equal(buffer[1].float(), expected_sum((3, N), engine.size)[1])
    assert torch.equal(buffer[2], filled(torch.empty_like(buffer), engine.rank)[2])
    filled(buffer, engine.rank)
    engine.reduce_(buffer, 1, "sum", **DEADLINE)
    wanted = expected_sum((3, N), engine.size)
    if engine.rank != 1:  # theirs stay as they were
        wanted = filled(torch.empty(3, N), engine.rank)
    assert torch.equal(buffer.float(), wanted)


@at_2_to_4
def test_moves_between_buffers():
    engine = dist.group.WORLD.unisono_engine
    me, size = engine.rank, engine.size
    buffer = engine.shared_buffer((size, N), torch.float32, timeout_s=20.0)
    rows = list(buffer.unbind())
    buffer.fill_(float(me))
    engine.all_gather(rows, rows[me], **DEADLINE)
    assert [row.unique().tolist() for row in rows] == [[float(q)] for q in range(size)]
    engine.broadcast_(buffer.view(-1), 0, **DEADLINE)
    buffer.add_(10.0 * me)
    outs = [torch.empty(N) for _ in range(size)]
    engine.all_to_all(outs, rows, **DEADLINE)
    assert [out.unique().tolist() for out in outs] == [[me + 10.0 * q] for q in range(size)]
    out = torch.empty(N)
    engine.reduce_scatter(out, rows, "sum", **DEADLINE)
    assert out.unique().tolist() == [size * me + 10.0 * sum(range(size))]
    engine.reduce_scatter(rows[me], rows, "sum", **DEADLINE)
    assert torch.equal(rows[me], out)
    outs = [torch.empty(N) for _ in range(size)]
    engine.gather(outs if me == 0 else None, rows[me], 0, **DEADLINE)
    if me == 0:
        assert [o.unique().item() for o in outs] == [
            size * q + 10.0 * sum(range(size)) for q in range(size)
        ]


@at_2_to_4
def test_ranks_that_disagree_about_the_place_fall_back_to_copies():
    engine = dist.group.WORLD.unisono_engine
    buffer = engine.shared_buffer((2, N), torch.float32, timeout_s=20.0)
    other = engine.shared_buffer((2, N), torch.float32, timeout_s=20.0)
    for mine in (
        buffer[engine.rank % 2],  # the same buffer, other offsets
        buffer[0] if engine.rank else torch.empty(N),  # one rank with a private tensor
        buffer[0] if engine.rank else other[0],  # another buffer
    ):
        filled(mine, engine.rank)
        engine.all_reduce_(mine, "sum", **DEADLINE)
        assert torch.equal(mine, expected_sum((N,), engine.size))
        filled(mine, engine.rank)
        outs = [torch.empty(N) for _ in range(engine.size)]
        engine.all_gather(outs, mine, **DEADLINE)
        for q, out in enumerate(outs):
            assert torch.equal(out, filled(torch.empty(N), q))


@at_2_to_4
def test_a_reduction_on_a_buffer_reads_the_other_ranks_memory_and_not_the_slots():
    engine = dist.group.WORLD.unisono_engine
    buffer = engine.shared_buffer((N,), torch.float32, timeout_s=20.0).fill_(1.0)
    engine.barrier(**DEADLINE)
    _, common, each, _, _ = core.load().layout(engine.size, 1 << 20)
    slots = (ctypes.c_ubyte * each).from_address(engine._address + common + engine.rank * each)
    ctypes.memset(slots, 77, each)
    engine.all_reduce_(buffer, "sum", **DEADLINE)
    assert buffer.unique().tolist() == [float(engine.size)]
    assert bytes(slots) == b"M" * each


@pytest.mark.ranks(2, backend="shm")
def test_torch_collectives_and_verbs_take_buffers_too():
    buffer = world().shared_buffer((N,), torch.float32).fill_(1.0)
    dist.all_reduce(buffer)
    assert buffer.unique().tolist() == [2.0]
    dist.all_reduce(buffer, async_op=True).wait()
    assert buffer.unique().tolist() == [4.0]
    world().all_reduce_(buffer)
    assert buffer.unique().tolist() == [8.0]


@pytest.mark.ranks(2, backend="shm")
def test_memory_goes_when_the_tensor_dies_and_views_keep_it():
    engine = dist.group.WORLD.unisono_engine
    before, fds = len(mapped_segments()), open_fds()
    buffer = engine.shared_buffer((N,), torch.float32, timeout_s=20.0)
    view = buffer[10:]
    assert len(mapped_segments()) == before + 1
    assert open_fds() == fds
    del buffer
    gc.collect()
    assert len(mapped_segments()) == before + 1
    assert view.sum() == 0
    del view
    gc.collect()
    assert len(mapped_segments()) == before
    for _ in range(30):
        engine.shared_buffer((N,), torch.float32, timeout_s=20.0)
    gc.collect()
    assert len(mapped_segments()) == before
    assert open_fds() == fds


@pytest.mark.ranks(2, backend="shm")
def test_a_buffer_stays_readable_after_its_group_is_gone():
    group = dist.new_group(backend="shm")
    buffer = group.unisono_engine.shared_buffer((N,), torch.float32, timeout_s=20.0).fill_(3.0)
    dist.destroy_process_group(group)
    assert buffer.sum() == 3 * N


def full(fd, offset, length):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.ranks(2, backend="shm")
def test_different_wishes_and_too_large_ones_are_refused_on_all_ranks(monkeypatch):
    group = dist.new_group(backend="shm")
    engine = group.unisono_engine
    if engine.rank == 1:
        monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UnisonoError, match=r"rank 1: .* 4\.0 MB of shared memory"):
        engine.shared_buffer((1024, 1024), torch.float32, timeout_s=20.0)
    monkeypatch.undo()
    small = engine.shared_buffer(
        (1000,), torch.float32, timeout_s=20.0
    )  # the group is as good as before
    assert small.numel() == 1000
    assert engine.shared_buffer((0, 3), torch.float32, timeout_s=20.0).shape == (0, 3)
    with pytest.raises(CollectiveMismatch, match="different"):
        engine.shared_buffer((10 + engine.rank,), torch.float32, timeout_s=20.0)
    dist.destroy_process_group(group)
