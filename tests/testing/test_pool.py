"""`RankPool` by itself: values, growth, reuse, recovery, what it refuses."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from tests.waiting import scaled_by_load

from unisono.comm import world
from unisono.errors import PlatformError
from unisono.testing import CannotTravel, RankFailure, RankPool


def rank_and_size(offset=0):
    return dist.get_rank() + offset, dist.get_world_size()


def test_run_returns_the_value_of_each_rank(rank_pool):
    assert rank_pool.run(rank_and_size, 10, world=3) == [(10, 3), (11, 3), (12, 3)]


def test_keyword_arguments_and_tensors_travel_both_ways(rank_pool):
    def scaled(x, *, by):
        y = by * x
        dist.all_reduce(y)
        return y

    big = torch.arange(200_000.0)
    for y in rank_pool.run(scaled, big, by=2.0):
        assert torch.equal(y, 4 * big)


def test_ranks_are_processes_that_outlive_a_call(rank_pool):
    first = rank_pool.run(os.getpid, world=2)
    starts = rank_pool.starts
    assert rank_pool.run(os.getpid, world=2) == first
    assert len({*first, os.getpid()}) == 3
    assert rank_pool.starts == starts


def test_failure_carries_what_each_rank_did(rank_pool):
    def each_its_own():
        if dist.get_rank() == 0:
            raise ValueError("zero")
        if dist.get_rank() == 1:
            os._exit(3)
        print("two is waiting")
        time.sleep(60)

    with pytest.raises(RankFailure) as caught:
        rank_pool.run(each_its_own, world=3, timeout=10)
    failure = caught.value
    assert isinstance(failure, AssertionError)
    assert failure.world == 3
    assert "ValueError: zero" in failure.raised[0]
    assert failure.died == {1: "exit code 3"}
    assert "time.sleep(60)" in failure.waiting[2]
    assert "two is waiting" in failure.output[2]
    assert str(failure).startswith("1 of 3 ranks raised, 1 died (exit code 3), 1 still waiting\n")


def test_collective_has_a_deadline_before_that_of_the_test(rank_pool):
    assert rank_pool.run(lambda: world().timeout_s, world=2, timeout=20.0) == [18.0, 18.0]


def test_collective_with_a_rank_that_never_comes_ends_at_the_deadline(rank_pool):
    def one_waits():
        if dist.get_rank() == 0:
            dist.barrier()

    start = time.monotonic()
    with pytest.raises(RankFailure, match="1 of 2 ranks still waiting, 1 returned") as caught:
        rank_pool.run(one_waits, world=2, timeout=1.0)
    assert "dist.barrier()" in caught.value.waiting[0]
    assert time.monotonic() - start < scaled_by_load(5)


def test_group_left_by_the_test_itself_is_no_failure(rank_pool):
    rank_pool.run(dist.destroy_process_group, world=2)
    assert rank_pool.run(rank_and_size, world=2) == [(0, 2), (1, 2)]


def test_rank_with_a_lasting_thread_is_replaced(rank_pool):
    def start_thread():
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        return os.getpid()

    before = rank_pool.run(start_thread, world=2)
    assert set(before).isdisjoint(rank_pool.run(os.getpid, world=2))


def test_forked_child_neither_answers_for_its_rank_nor_hides_its_death(rank_pool, monkeypatch):
    monkeypatch.setattr(rank_pool, "grace_s", 20.0)  # both are to be seen to die

    def fork_and_die():
        if os.fork() == 0:
            time.sleep(60)
        os._exit(5)

    def fork_and_return():
        os.fork()
        return dist.get_rank()

    start = time.monotonic()
    with pytest.raises(RankFailure, match=r"2 of 2 ranks died \(exit code 5\)"):
        rank_pool.run(fork_and_die, world=2, timeout=30)
    assert time.monotonic() - start < scaled_by_load(15)
    assert rank_pool.run(fork_and_return, world=2) == [0, 1]
    assert rank_pool.run(dist.get_rank, world=2) == [0, 1]


class CountsCopies:
    """Tells how often it was pickled and unpickled."""

    pickled = 0
    unpickled = 0

    def __getstate__(self):
        CountsCopies.pickled += 1
        return {"there": True}

    def __setstate__(self, state):
        dist.unpickled = getattr(dist, "unpickled", 0) + 1


def test_what_stays_the_same_between_drawn_calls_is_packed_and_unpacked_once(rank_pool):
    def total(lasting, n):
        found = (dist.unpickled, n)
        if n == 2:
            del dist.unpickled
        return found

    CountsCopies.pickled = 0
    with rank_pool.open(2) as ranks:
        lasting = {"lasting": CountsCopies()}
        found = [ranks.call(total, (), lasting, drawn={"n": n}) for n in range(3)]
    assert found == [[(1, n)] * 2 for n in range(3)]
    assert CountsCopies.pickled == 1


def test_value_that_cannot_travel_is_told(rank_pool):
    with pytest.raises(RankFailure, match="rank 0 returned a lock that cannot travel"):
        rank_pool.run(threading.Lock, world=1)


def test_argument_that_cannot_travel_is_named(rank_pool):
    with pytest.raises(CannotTravel, match="argument 'offset' of rank_and_size") as caught:
        rank_pool.run(rank_and_size, offset=threading.Lock())
    assert "HINT:" in str(caught.value)


@pytest.mark.parametrize("size", [0, -1, 17])
def test_world_of_a_wrong_size_is_refused(rank_pool, size):
    with pytest.raises(PlatformError, match=f"ranks of a world={size}"):
        rank_pool.run(rank_and_size, world=size)


def test_pool_starts_again_when_its_warm_process_was_killed(rank_pool):
    rank_pool.run(rank_and_size, world=1)
    directory, starts = rank_pool.warm_up().directory, rank_pool.starts
    os.kill(rank_pool.warm_up().server.pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while rank_pool.warm_up().server.is_alive:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert rank_pool.run(rank_and_size, world=1) == [(0, 1)]
    assert rank_pool.starts == starts + 1
    assert not directory.exists()


def test_pool_that_was_never_used_starts_nothing():
    with RankPool() as pool:
        assert pool.owned() == set()
    assert pool.starts == 0


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("value", [1.5])
def test_marker_here_too(value, rank_count):
    x = torch.full((2,), value)
    dist.all_reduce(x)
    assert x.tolist() == [value * rank_count] * 2
