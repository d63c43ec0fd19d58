"""Tests that fail in every way a rank can fail, each followed by one that must pass."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from multiprocessing import shared_memory
from pathlib import Path

import pytest

STARTS = []


def rank_and_barrier():
    import torch.distributed as dist

    return dist.get_rank(), dist.barrier


def sum_over_ranks():
    import torch
    import torch.distributed as dist

    x = torch.ones(1)
    dist.all_reduce(x)
    return x.item()


@pytest.mark.ranks(4)
def test_first():
    assert sum_over_ranks() == 4


def test_count_starts(rank_pool):
    STARTS.append(rank_pool.starts)


@pytest.mark.ranks(4)
def test_one_rank_asserts_and_the_others_wait():
    rank, barrier = rank_and_barrier()
    print(f"rank {rank} was here")
    values = [1, 2, 3 + rank]
    if rank == 2:
        assert values == [1, 2, 3]
    barrier()


@pytest.mark.ranks(4)
def test_after_an_assert():
    assert sum_over_ranks() == 4


@pytest.mark.ranks(3)
def test_all_ranks_assert_the_same():
    total = sum_over_ranks()
    assert total == 4, "the total is wrong"


@pytest.mark.ranks(3, timeout=10)
def test_one_rank_exits_with_7():
    rank, barrier = rank_and_barrier()
    if rank == 1:
        os._exit(7)
    barrier()


@pytest.mark.ranks(3)
def test_after_an_exit():
    assert sum_over_ranks() == 3


@pytest.mark.ranks(2, timeout=10)
def test_one_rank_kills_itself():
    rank, _ = rank_and_barrier()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(100)


@pytest.mark.ranks(2, timeout=10)
def test_one_rank_reads_address_0():
    import ctypes

    rank, _ = rank_and_barrier()
    if rank == 0:
        ctypes.string_at(0)


@pytest.mark.ranks(2)
def test_after_a_kill():
    assert sum_over_ranks() == 2


@pytest.mark.ranks(2, timeout=1)
def test_one_rank_sleeps_for_ever():
    rank, barrier = rank_and_barrier()
    if rank == 1:
        time.sleep(1000)
    barrier()


@pytest.mark.ranks(2, timeout=1)
def test_one_rank_is_in_an_endless_c_call():
    rank, _ = rank_and_barrier()
    if rank == 1:
        re.match(r"(a+)+$", "a" * 64 + "b")  # holds the interpreter lock


@pytest.mark.ranks(2, timeout=1)
def test_one_rank_is_stopped():
    rank, _ = rank_and_barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.ranks(2)
def test_after_stalls():
    assert sum_over_ranks() == 2


@pytest.mark.ranks(2, timeout=1)
def test_a_stalled_rank_has_children_and_shared_memory():
    rank, _ = rank_and_barrier()
    if rank == 1:
        name = f"{os.environ['BENCH_UNDER_TEST'][:8]}-segment"
        segment = shared_memory.SharedMemory(name, create=True, size=64)
        child = subprocess.Popen(["sleep", "1000"])
        print("child", child.pid, "segment", Path("/dev/shm", segment.name).exists())
        time.sleep(1000)


@pytest.mark.ranks(2)
def test_unknown_exception_types_travel():
    class Odd(Exception):
        def __init__(self, a, b):
            super().__init__(f"{a} and {b}")

    try:
        raise KeyError("cause")
    except KeyError as error:
        raise Odd("this", "that") from error


@pytest.mark.ranks(2)
def test_system_exit_is_a_failure():
    raise SystemExit(3)


@pytest.mark.ranks(2, backend="no-such-backend")
def test_backend_that_does_not_exist():
    pass


@pytest.mark.ranks([1, 2, 4])
def test_after_everything(rank_count):
    assert sum_over_ranks() == rank_count


def test_ranks_were_started_when_needed_only(rank_pool):
    print("starts", rank_pool.starts - STARTS[0])
