"""Deadlines, failures, departures: always an error that names ranks, never a hang."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from verbs import raised

from unisono import torch_private
from unisono.comm import Communicator, world
from unisono.errors import CollectiveMismatch, RankFailed, RankTimeout, UnisonoError


def group_made(**options):
    return dist.new_group(backend="mpi4py", **options)


def meanwhile(group):
    """Hold the other ranks until rank 0 has seen what it should see."""
    dist.barrier()
    dist.destroy_process_group(group)


def check_a_deadline_names_the_missing_ranks_and_breaks_the_group():
    group = group_made(timeout=timedelta(seconds=0.6))
    group.set_timeout(timedelta(seconds=0.6))
    group._deadline_s = None
    others = list(range(1, dist.get_world_size()))
    if dist.get_rank() == 0:
        began = time.monotonic()
        error = raised(RankTimeout, lambda: dist.barrier(group=group))
        assert 0.5 < time.monotonic() - began < 10
        assert list(error.missing) == others, error
        assert "HINT" in str(error)
        later = raised(UnisonoError, lambda: dist.all_reduce(torch.ones(1), group=group))
        assert "first cause: RankTimeout" in str(later)
    meanwhile(group)


def check_a_deadline_of_a_verb_brings_the_stacks_of_the_others():
    group = group_made()
    comm = Communicator.of(group)
    if comm.rank == 0:
        error = raised(RankTimeout, lambda: comm.all_reduce(torch.ones(3), timeout_s=0.3))
        assert set(error.missing) == set(range(1, comm.size))
        assert "meanwhile" in error.stacks[1]
    meanwhile(group)


def check_a_deadline_of_a_call_behind_is_raised_when_somebody_waits():
    group = group_made(timeout=timedelta(seconds=0.4))
    group._deadline_s = None
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.ones(4), group=group, async_op=True)
        error = raised(RankTimeout, work.wait)
        assert "timed out after 0.4 s" in str(error)
        assert "all_reduce(sum) #1" in str(error)
        assert not work.is_success()
        assert "timed out" in str(raised(RuntimeError, lambda: work.get_future().wait()))
    meanwhile(group)


def check_an_exception_of_one_rank_reaches_those_that_wait_for_it():
    group = group_made()
    engine = group.unisono_engine
    if dist.get_rank() == 1:
        engine.channel.until = None  # a bug: its next kernel raises TypeError
        raised(TypeError, lambda: dist.all_reduce(torch.ones(3), group=group, async_op=True).wait())
    else:
        began = time.monotonic()
        error = raised(RankFailed, lambda: dist.all_reduce(torch.ones(3), group=group))
        assert time.monotonic() - began < 10
        assert error.rank == 1
        assert "TypeError" in error.traceback
        again = raised(RankFailed, lambda: dist.barrier(group=group))
        assert "first cause" in str(again)
    meanwhile(group)


def check_a_rank_that_leaves_while_others_wait_is_named():
    group = group_made()
    if dist.get_rank() == 1:
        dist.destroy_process_group(group)
        dist.barrier()
    else:
        error = raised(RankFailed, lambda: dist.all_reduce(torch.ones(3), group=group))
        assert "rank 1 has closed the group" in str(error)
        meanwhile(group)


def check_a_message_outlives_the_group_of_its_sender():
    group = group_made()
    if dist.get_rank() == 0:
        dist.send(torch.arange(100.0), 1, group=group)
        dist.destroy_process_group(group)
        dist.barrier()
        return
    dist.barrier()
    if dist.get_rank() == 1:
        x = torch.empty(100)
        dist.recv(x, 0, group=group)
        assert x.sum() == 4950
    dist.destroy_process_group(group)


def check_a_receive_that_nobody_answers_ends_and_never_writes_later():
    group = group_made(timeout=timedelta(seconds=0.3))
    group._deadline_s = None
    x = torch.zeros(3)
    if dist.get_rank() == 0:
        error = raised(RankTimeout, lambda: dist.recv(x, 1, group=group))
        assert list(error.missing) == [1]
    dist.barrier()
    dist.destroy_process_group(group)
    assert x.tolist() == [0.0] * 3


def check_messages_of_another_length_are_refused_by_their_receiver():
    for length in (3, 5):
        group = group_made()
        if dist.get_rank() == 0:
            dist.isend(torch.ones(4), 1, group=group)
        if dist.get_rank() == 1:
            words = f"16 != {length} * 4" if length > 4 else f"more than {length} * 4"
            error = raised(
                CollectiveMismatch,
                lambda group=group, n=length: dist.recv(torch.empty(n), 0, group=group),
            )
            assert words in str(error), error
        meanwhile(group)


def check_a_group_that_not_all_members_make_is_given_up():
    if dist.get_rank() == 0:
        ranks = tuple(range(dist.get_world_size()))
        # Not by dist.new_group(use_local_synchronization=True): torch 2.15 counts its calls, on one
        # rank here, and names later groups by the count, so that ranks would wait for each other.
        error = raised(
            RankTimeout,
            lambda: torch_private.new_group("given up", ranks, "mpi4py", timedelta(seconds=0.5)),
        )
        assert list(error.missing) == list(ranks[1:])
        assert "a mpi4py group" in str(error)
    dist.barrier()


def check_a_forked_child_is_told_that_it_cannot_use_the_group():
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        words = b"nothing was raised"
        try:
            dist.all_reduce(torch.ones(1))
        except BaseException as error:
            words = str(error).encode()
        os.write(writing, words[:2000])
        os._exit(0)
    os.waitpid(child, 0)
    text = os.read(reading, 2000).decode()
    os.close(reading)
    os.close(writing)
    assert "this process was forked from rank" in text, text
    assert float(world().all_reduce(torch.ones(1))) == world().size
