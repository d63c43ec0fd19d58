"""How a run is watched and tried again, with ranks that only play their part. No process here."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from unisono.launch import Platform, attempts
from unisono.launch.attempts import Attempts, Progress
from unisono.launch.pool import verdict
from unisono.launch.pool.protocol import Failed, RankState
from unisono.launch.pool.protocol import RunPlan as Plan
from unisono.launch.supervisor import CAUSE_S, COLLECT_S, Ranks, Supervisor

FAILED = Failed(summary="ValueError: no", traceback="", pickled=None, is_consequence=False)
LEFT = replace(FAILED, summary="RankFailed: rank 1 died", is_consequence=True)


class Played(Ranks):
    """Two ranks that say what a script has for them: one step for each wait.

    A step is the state of each rank, or a function that is called. After the last nothing happens.
    """

    def __init__(self, *steps):
        self.states = [RankState(rank=rank, host="h") for rank in range(2)]
        self.done = []
        self._steps = list(steps)

    def start(self):
        self.done.append("start")

    def wait(self, timeout_s):
        if not self._steps:
            time.sleep(0.02 if timeout_s is None else min(0.02, timeout_s))
            return False
        step = self._steps.pop(0)
        if callable(step):
            step()
        else:
            for state, word in zip(self.states, step, strict=True):
                report = {"failed": FAILED, "left": LEFT}.get(word)
                news = {"state": word} if report is None else {"state": "failed", "failed": report}
                if news["state"] != state.state:
                    state.take(news)
        return True

    def wake(self):
        pass

    def interrupt(self, seconds):
        self.done.append(f"interrupt {seconds:g}")

    def finish(self):
        self.done.append("finish")

    def stop(self, reason):
        self.done.append(f"stop: {reason}")

    def stacks(self):
        return {}

    def value(self, rank):
        raise NotImplementedError

    def close(self, *, at_once):
        self.done.append(f"close {at_once}")


def plan(**fields):
    platform = Platform(device="cpu", ranks=2, interrupt_s=0.2)
    return replace(Plan.of(platform, timeout_s=None, max_restarts=0), **fields)


def watched(ranks, **fields):
    supervisor = Supervisor(ranks, plan(**fields), 0)
    begin = time.monotonic()
    return supervisor.run(), time.monotonic() - begin


READY = ("ready", "ready")


def test_ranks_that_have_all_returned_are_let_go():
    ranks = Played(READY, ("returned", "ready"), ("returned", "returned"))
    ending, _ = watched(ranks)
    assert (ending.state, ending.was_ready) == ("done", True)
    assert ranks.done == ["start", "finish", "close None"]
    ending, _ = watched(Played(READY, ("requeued", "requeued")))
    assert ending.state == "requeued"


def test_after_a_failure_others_have_a_moment_to_report_and_no_more():
    ranks = Played(READY, ("ready", "failed"))
    ending, took_s = watched(ranks)
    assert ending.state == "failed"
    assert ranks.done == ["start", "stop: another rank failed", "close None"]
    assert COLLECT_S <= took_s < COLLECT_S + 1.0
    _, took_s = watched(Played(READY, ("died", "failed")))
    assert took_s < COLLECT_S  # there is nobody to wait for


def test_the_end_of_a_rank_that_others_report_is_waited_for():
    late_s = 2 * COLLECT_S
    ranks = Played(READY, ("left", "ready"), lambda: time.sleep(late_s), ("left", "died"))
    ending, _ = watched(ranks)
    assert ranks.states[1].state == "died"
    assert verdict.choose_cause(ranks.states).rank == 1
    assert ending.state == "failed"
    _, took_s = watched(Played(READY, ("left", "ready")))
    assert CAUSE_S <= took_s < CAUSE_S + 1.0


@pytest.mark.parametrize(
    ("steps", "words"),
    [((), "not ready 0.1 s after the start"), ((READY,), "not done within timeout_s=0.1")],
)
def test_deadlines_of_the_start_and_of_the_function(steps, words):
    ranks = Played(*steps)
    ending, _ = watched(ranks, start_timeout_s=0.1, timeout_s=0.1)
    assert (ending.state, ending.deadline) == ("timeout", words)
    assert ranks.done[1] == "stop: deadline"


def test_who_starts_ranks_and_leaves_without_their_word_has_lost_them():
    ranks = Played(READY, lambda: setattr(ranks, "has_left", True))
    ending, _ = watched(ranks)
    assert ending.state == "lost"
    assert ranks.done == ["start", "close None"]


def interrupted(*steps):
    ranks = Played(*steps)
    supervisor = Supervisor(ranks, plan(), 0)
    ranks._steps.insert(len(steps) - 1, lambda: supervisor.ask(supervisor.interrupt))
    return ranks, supervisor


def test_an_interrupt_lets_ranks_save_for_a_time():
    ranks, supervisor = interrupted(READY, ("returned", "returned"))
    assert supervisor.run().state == "cancelled"
    assert ranks.done == ["start", "interrupt 0.2", "finish", "close None"]
    ranks, supervisor = interrupted(READY, ("returned", "ready"))
    assert supervisor.run().state == "cancelled"
    assert ranks.done == ["start", "interrupt 0.2", "stop: interrupted", "close None"]
    ranks, supervisor = interrupted(("running", "ready"), ("running", "ready"))
    assert supervisor.run().state == "cancelled"  # one function runs already
    assert ranks.done == ["start", "interrupt 0.2", "stop: interrupted", "close None"]
    ranks, supervisor = interrupted(("running", "running"), ("running", "running"))
    assert supervisor.run().state == "cancelled"  # no function runs that could save anything
    assert ranks.done == ["start", "interrupt 0.2", "stop: interrupted", "close None"]


def test_a_second_interrupt_kills_at_once_and_any_other_error_ends_in_order():
    def raise_it():
        raise KeyboardInterrupt

    ranks, supervisor = interrupted(READY, raise_it)
    ranks._steps.insert(2, READY)
    with pytest.raises(KeyboardInterrupt):
        supervisor.run()
    assert ranks.done[-1] == "close True"
    ranks = Played(READY, raise_it)
    with pytest.raises(KeyboardInterrupt):
        watched(ranks)
    assert ranks.done == ["start", "close False"]


class PlayedSeries(Attempts):
    """Attempts of which each is a script."""

    def __init__(self, *scripts, **fields):
        super().__init__(plan(**fields), None, Progress())
        self.scripts = list(scripts)
        self.noted = []
        self.is_wanted = True

    def ranks(self):
        return Played(*self.scripts.pop(0))

    def is_cancelled(self):
        return not self.is_wanted

    def note(self, state):
        self.progress.state = state
        self.noted.append(state)


BAD, GOOD, AGAIN = (
    (READY, ("failed", "died")),
    (READY, ("returned", "returned")),
    (READY, ("requeued", "requeued")),
)


@pytest.fixture
def no_pause(monkeypatch):
    monkeypatch.setattr(attempts, "LONGEST_PAUSE_S", 0.0)


def test_a_failed_attempt_is_followed_by_another_as_often_as_allowed(no_pause):
    series = PlayedSeries(BAD, AGAIN, BAD, GOOD, max_restarts=2)
    assert series.run().state == "done"
    progress = series.progress
    assert (progress.attempt, progress.requeues, progress.ending.attempt) == (3, 1, 3)
    line = "rank 1 of 2 on h was stopped"
    assert progress.causes == [f"attempt 0: {line}", f"attempt 2: {line}"]
    assert progress.announced == [
        f"unisono: {line}; attempt 2 of 3 begins in 0 s",
        f"unisono: {line}; attempt 4 of 4 begins in 0 s",
    ]
    series = PlayedSeries(BAD, BAD, max_restarts=1)
    assert series.run().state == "failed"
    assert len(series.progress.causes) == 2


def test_a_series_is_cancelled_before_an_attempt_in_one_and_between_two(monkeypatch):
    series = PlayedSeries(GOOD)
    series.is_wanted = False
    assert series.run().state == "cancelled"
    series = PlayedSeries((READY, lambda: series._supervisor.cancel()))
    assert series.run().state == "cancelled"
    series = PlayedSeries(BAD, GOOD, max_restarts=1)
    monkeypatch.setattr(
        series, "note", lambda _: setattr(series, "is_wanted", len(series.scripts) == 2)
    )
    begin = time.monotonic()
    assert series.run().state == "cancelled"
    assert time.monotonic() - begin < 0.9  # not after the pause
