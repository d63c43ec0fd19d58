"""What errors say: who is to blame, where everybody stands, and what to type instead."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests.waiting import answered, scaled_by_load, wait_until_answered

from unisono.comm import check, close_world, post_failure, posted_failure, trace, world
from unisono.comm.health import watchdog
from unisono.errors import CollectiveMismatch, RankTimeout, UnisonoError

both = pytest.mark.ranks(2, backend=["gloo", "shm"])
on_shm = pytest.mark.ranks(2, backend="shm")


def absent_minded(folder):
    wait_until_answered(folder, 0)


def watchdogs():
    return [t for t in threading.enumerate() if t.name == "unisono-watchdog"]


@on_shm
def test_two_ranks_that_both_wait_for_a_message_blame_no_failure(tmp_path):
    """The one whose deadline passes first must not make the other a failed rank."""
    comm = world()
    other = 1 - comm.rank
    with pytest.raises(RankTimeout) as caught:
        comm.recv(((2,), torch.float32), other, timeout_s=0.5 + comm.rank)
    text = str(caught.value)
    assert caught.value.missing == (other,)
    assert f"no message came from rank {other}" in text
    assert f"rank {other}: latest collective recv(from {comm.rank})" in text
    assert text.splitlines()[0].endswith(f"; rank {comm.rank} waits for it") or comm.rank == 1
    assert f"HINT: this rank and rank {other} wait for a message of each other" in text
    if comm.rank == 1:  # ends with the other, not a second later
        assert "rank 0 waited for this rank and has given up" in text
    answered(tmp_path)
    wait_until_answered(tmp_path, 0, 1)


@pytest.mark.ranks(3, backend=["gloo", "shm"])
def test_a_group_asked_for_in_different_orders_is_explained(tmp_path):
    comm = world()
    if comm.rank == 2:
        wait_until_answered(tmp_path, 0, 1)
        return
    mine, theirs = ([0, 1], [1, 0])[:: 1 - 2 * comm.rank]
    with pytest.raises(RankTimeout) as caught:
        comm.with_timeout(0.5).sub(mine)
    text = str(caught.value)
    assert f"new_group(ranks {mine})" in text
    assert f"rank {1 - comm.rank}: latest collective new_group(ranks {theirs})" in text
    assert "HINT: ranks are making different groups" in text
    answered(tmp_path)
    wait_until_answered(tmp_path, 0, 1)


@both
def test_the_deadline_of_making_a_group_is_not_that_of_its_calls():
    part = world().with_timeout(17.0).sub([1, 0])
    assert part is not None
    assert part.timeout_s == 17.0
    assert part._entry.timeout_s == world()._entry.timeout_s


@on_shm
def test_check_mode_on_one_rank_only_is_explained_on_both(tmp_path):
    comm = world()
    with check(comm.rank == 0), pytest.raises(CollectiveMismatch) as caught:
        comm.all_reduce(torch.ones(2), timeout_s=20)
    assert "is check mode on there alone" in str(caught.value)
    answered(tmp_path)
    wait_until_answered(tmp_path, 0, 1)


@pytest.mark.ranks(3, backend=["gloo", "shm"])
def test_check_mode_follows_ranks_that_sent_different_numbers_of_messages():
    comm = world()
    with check():
        if comm.rank == 0:
            comm.send(torch.ones(2), 1, timeout_s=20)
        elif comm.rank == 1:
            comm.recv(((2,), torch.float32), 0, timeout_s=20)
        assert comm.all_reduce(torch.ones(2), timeout_s=20).tolist() == [3.0, 3.0]


@on_shm
def test_calls_of_torch_that_time_out_tell_who_is_missing_and_where(tmp_path):
    group = dist.new_group(backend="shm", timeout=timedelta(seconds=20))
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2), process_group=group)
    second = dist.new_group(backend="shm", timeout=timedelta(seconds=20))
    third = dist.new_group(backend="shm", timeout=timedelta(seconds=20))
    dist.barrier(group=second)
    if dist.get_rank() == 1:
        absent_minded(tmp_path)
        return
    for each in (group, second, third):
        each.set_timeout(timedelta(seconds=0.5))
    with pytest.raises(RankTimeout) as caught:
        dist.all_reduce(torch.ones(2), group=second)
    assert caught.value.missing == (1,)
    assert "absent_minded" in caught.value.stacks[1]
    with pytest.raises(
        RankTimeout, match=r"no message came from rank 1: recv\(from 1\) on "
    ) as caught:
        dist.recv(torch.empty(2), 1, group=third)
    assert "absent_minded" in caught.value.stacks[1]
    with pytest.raises((RankTimeout, RuntimeError), match="rank 1 has not arrived") as caught:
        model(torch.ones(1, 2)).sum().backward()
    assert "absent_minded" in str(caught.value)
    assert "test_reports.py" in str(caught.value).splitlines()[0]  # the call, in another thread
    answered(tmp_path)


@on_shm
def test_a_wait_for_a_shared_buffer_ends_at_the_communicators_deadline(tmp_path):
    comm = world().with_timeout(0.5)
    if comm.rank == 0:
        with pytest.raises(RankTimeout, match=r"shared_buffer.*timed out after 0.5 s"):
            comm.shared_buffer((4,))
        answered(tmp_path)
    else:
        absent_minded(tmp_path)


@on_shm
def test_the_trace_of_a_verb_counts_the_time_spent_waiting_for_the_others():
    comm = world()
    with trace() as t:
        if comm.rank == 1:
            time.sleep(0.3)
        comm.all_reduce(torch.ones(2))
        if comm.rank == 1:
            time.sleep(0.3)
            comm.send(torch.ones(2), 0)
        else:
            comm.recv(((2,), torch.float32), 1)
            time.sleep(0.2)
        pending = comm.start.all_reduce(torch.ones(2))
        if comm.rank == 1:
            time.sleep(0.2)
        pending.wait()
    first, message, later = t.events
    if comm.rank == 0:
        assert first.wait_ns > 1e8
        assert message.wait_ns > 1e8
    else:
        assert first.wait_ns < 1e8
        assert later.wait_ns < 1e8  # hidden behind what this rank did meanwhile
    assert all(e.wait_ns <= e.t_end - e.t_start for e in t.events)


def test_an_expanded_tensor_is_refused_as_a_target_before_anything_is_sent():
    comm = world()
    wide = torch.ones(2, 1).expand(2, 3)
    for verb in (comm.all_reduce_, comm.broadcast_):
        with pytest.raises(UnisonoError, match=r"strides \[1, 0\]: along dim 1 all 3") as caught:
            verb(wide)
        assert "HINT: x = x.clone()" in str(caught.value)
    assert comm.all_reduce(wide).tolist() == [[1.0] * 3] * 2
    assert comm.all_reduce_(torch.ones(1, 3).expand(1, 3)).tolist() == [[1.0] * 3]


@on_shm
def test_an_expanded_tensor_is_refused_in_calls_of_torch():
    for call in (dist.all_reduce, lambda x: dist.broadcast(x, 0)):
        with pytest.raises(UnisonoError, match="of an expanded tensor"):
            call(torch.ones(1).expand(3))
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == 2


@both
def test_a_world_in_which_a_rank_failed_is_left_without_waiting_for_it(tmp_path):
    comm = world()
    comm.barrier()
    if comm.rank == 1:
        post_failure(ValueError("a bug"))
        wait_until_answered(tmp_path, 0)  # and does not come to the end of the world before
        close_world()
        return
    time.sleep(0.3)
    began = time.monotonic()
    close_world()
    close_world()  # can be repeated
    assert time.monotonic() - began < scaled_by_load(2.2)
    answered(tmp_path, 0)
    assert posted_failure() is None  # the world is over: nothing is asked, nothing started
    assert not watchdogs()


RAISES_ON_RANK_0 = """
import torch, unisono
comm = unisono.world()
comm.barrier()
if comm.rank == 0:
    raise ValueError("the keeper of the store has a bug")
comm.all_reduce(torch.ones(1))
"""


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_rank_that_ends_by_an_exception_tells_the_others_before_it_goes(interpreter, backend):
    """It keeps the store: were it gone at once, the others would know of a lost connection only."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    local = {"LOCAL_WORLD_SIZE": "2", "UNISONO_BACKEND": backend}
    python = interpreter.python
    began = time.monotonic()
    ranks = [
        subprocess.Popen(
            [python, "-c", RAISES_ON_RANK_0],
            env={**os.environ, **common, **local, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    keeper, other = (process.communicate(timeout=120)[1] for process in ranks)
    assert "ValueError: the keeper of the store has a bug" in keeper
    assert re.search(r"rank 0 of 2 on \S+ raised ValueError: the keeper", other)
    assert "ValueError: the keeper of the store has a bug" in other
    assert all(process.returncode == 1 for process in ranks)
    assert time.monotonic() - began < scaled_by_load(60)


NO_CALL_BUT_ON_RANK_0 = """
import datetime, os, signal, time
import torch.distributed as dist

dist.init_process_group("shm", timeout=datetime.timedelta(seconds=3))
rank = dist.get_rank()
if rank == 1:
    time.sleep(100)
if rank == 2:
    time.sleep(2)
    os.kill(os.getpid(), signal.SIGSTOP)
began = time.monotonic()
try:
    dist.barrier()
except TimeoutError as error:
    print(f"after {time.monotonic() - began} s", error)
    os._exit(0)  # waits for none of them
"""


def test_ranks_that_have_made_no_call_are_told_apart_from_those_that_are_stopped():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "3"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", NO_CALL_BUT_ON_RANK_0],
            env={**os.environ, **common, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        report = ranks[0].communicate(timeout=110)[0]
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    assert "rank 1: alive, has made no call yet; it is at <string>:8\n" in report
    assert "rank 2: its process is stopped" in report
    seconds = float(report.split()[1])
    assert seconds < scaled_by_load(3 + watchdog.ANSWER_S)  # not the wait for the one that stopped
