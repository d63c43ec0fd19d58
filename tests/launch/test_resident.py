"""Ranks that stay and answer: in rank order, one error for a failure, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time

import pytest
from tests.waiting import is_running, wait_until

from unisono.errors import RankFailed
from unisono.launch.resident import ResidentRanks


def lose_place():
    """Make a rank fail when it is about to tell its number."""
    if os.environ["RANK"] == "1":
        del os.environ["RANK"]
    return len


def make(factor):
    from unisono.comm import world

    calls = []

    def answer(question):
        if question == "raise":
            if world().rank == 1:
                raise ValueError("not by rank 1")
            world().barrier()
        calls.append(question)
        return world().rank * factor, len(calls), os.getpid()

    return answer


def test_all_ranks_answer_and_keep_what_they_know_until_they_are_let_go():
    before = threading.active_count()
    with ResidentRanks(make, 10, ranks=2) as team:
        first, second = team.ask(0), team.ask(0)
        assert [answer[0] for answer in second] == [0, 10]
        assert [answer[1] for answer in second] == [2, 2]
        assert [answer[2] for answer in first] == [answer[2] for answer in second]
        assert not team.is_closed
    assert team.is_closed
    team.close()
    assert not any(is_running(answer[2]) for answer in second)
    for _ in range(50):
        if threading.active_count() <= before:
            break
        time.sleep(0.1)
    assert threading.active_count() <= before


def test_a_rank_that_raises_is_one_error_with_its_traceback():
    team = ResidentRanks(make, 1, ranks=2)
    pids = [answer[2] for answer in team.ask(0)]
    with pytest.raises(RankFailed, match="not by rank 1"):
        team.ask("raise")
    assert team.is_closed
    assert not any(is_running(pid) for pid in pids)
    with pytest.raises(RankFailed, match="ZeroDivisionError"):
        ResidentRanks(lambda: 1 / 0, ranks=2)
    with pytest.raises(RankFailed, match="KeyError"):
        ResidentRanks(lose_place, ranks=2)


def test_ranks_end_with_the_process_that_asked_them(forked_python):
    code = """
from unisono.launch.resident import ResidentRanks
import os, time
if __name__ == "__main__":
    team = ResidentRanks(lambda: lambda _: os.getpid(), ranks=2)
    print(*team.ask(0), flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([forked_python, "-c", code], stdout=subprocess.PIPE, text=True) as caller:
        assert caller.stdout is not None
        pids = [int(word) for word in caller.stdout.readline().split()]
        caller.send_signal(signal.SIGKILL)
    assert len(pids) == 2
    wait_until(lambda: not any(is_running(pid) for pid in pids), 30.0)
