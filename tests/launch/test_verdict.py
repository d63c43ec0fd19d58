"""Whose fault it is, and what the caller reads. No process here."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from unisono.errors import CollectiveMismatch, RankFailed, RankTimeout, RemoteError
from unisono.launch.pool.protocol import Failed, RankState, Standing
from unisono.launch.pool.verdict import Ending, choose_cause, failure, judge


def report(summary="ValueError: bad", *, consequence=False, error=None, code=None, site=""):
    return Failed(
        summary=summary,
        traceback=f"Traceback (most recent call last):\n{summary}\n",
        pickled=pickle.dumps(error) if error is not None else None,
        is_consequence=consequence,
        exit_code=code,
        site=site,
    )


def known(rank, *, failed=None, failed_at=0.0, exit_code=None, **more):
    """What is known of a rank that failed, died, or did neither."""
    word = "failed" if failed else "running" if exit_code is None else "died"
    state = RankState(
        rank=rank, host="h", node=f"n{rank}", state=word, failed=failed, exit_code=exit_code, **more
    )
    return replace(state, at={"failed": failed_at} if failed else {})


def ending(word, **fields):
    values = {"was_ready": True, "start_s": 1.0, "wall_s": 2.0} | fields
    return Ending(state=word, attempt=1, **values)


def test_the_suspect_of_a_deadline_is_behind_the_others_or_outside_of_collectives():
    def at(number, group="world"):
        return Standing(call=f"barrier #{number}", group=group, number=number)

    def suspect(standings, stacks):
        states = [known(r, stack=s, standing=standings.get(r)) for r, s in stacks.items()]
        error = judge(states, ending("timeout", deadline="late"), Path("/logs"))
        return error.rank, str(error).partition("\n")[0]

    inside = 'Current thread 0x01:\n  File "/site-packages/torch/distributed/x.py", line 1 in f'
    stacks = dict.fromkeys(range(3), inside)
    blamed = 1, "rank 1 of 3 late; ranks 0, 2 waited for it"
    assert suspect({0: at(5), 1: at(4), 2: at(5)}, stacks) == blamed
    everybody = None, "ranks 0-2 of 3 late"
    assert suspect({0: at(5), 1: at(5), 2: at(5)}, stacks) == everybody
    assert suspect({0: at(5), 1: at(2, "pair"), 2: at(5)}, stacks) == everybody
    outside = 'Current thread 0x01:\n  File "mine.py", line 1 in f'
    assert suspect({}, {**stacks, 1: outside}) == blamed
    two = None, "ranks 1-2 of 3 late; rank 0 waited for them"
    assert suspect({}, {**stacks, 1: outside, 2: outside}) == two
    assert suspect({}, {0: ""}) == (0, "rank 0 of 1 late")


LOST = report("ConnectionError", consequence=True)


@pytest.mark.parametrize(
    "states",
    [
        [known(0, failed=report(), failed_at=1.0), known(1, exit_code=-9), known(2)],
        [known(0, failed=LOST, failed_at=1.0), known(1, failed=report(), failed_at=2.0)],
        [known(0, failed=report("KeyError"), failed_at=2.0), known(1, failed=report())],
    ],
    ids=["a silent death", "an error of its own, after a lost connection", "the earliest"],
)
def test_the_cause_is_the_rank_that_failed_first_in_meaning(states):
    assert choose_cause(states).rank == 1


def test_ranks_that_raise_the_same_error_are_no_consequences_and_the_lowest_is_the_cause():
    late = known(1)
    late.note("stopped")
    late.take({"state": "failed", "failed": report()})
    states = [
        known(0, failed=report("lost", consequence=True), failed_at=0.5),
        late,
        known(2, failed=report(), failed_at=1.0),
        known(3, failed=report(), failed_at=1.5),
    ]
    error = failure(states)
    assert isinstance(error, RankFailed)
    assert (error.rank, error.consequences) == (1, {0: "lost"})
    assert "The same happened on ranks 2-3\nStopped as a consequence: rank 0 (lost)" in str(error)


def test_a_script_that_makes_the_process_group_itself_is_told_that_it_is_there():
    twice = report("ValueError: trying to initialize the default process group twice!")
    error = failure([known(0, failed=twice)], attempt=1)
    assert "is_initialized()" in str(error).splitlines()[-1]


def test_the_message_has_headline_traceback_the_others_and_a_hint():
    states = [
        known(0, failed=report("lost", consequence=True, site="a.py:3 in step"), failed_at=1.5),
        known(1, failed=report(error=ValueError("bad")), failed_at=1.0),
        known(2, stack=STACK.format(9)),
        known(3, stack=STACK.format(9)),
    ]
    error = failure(states, Path("/logs"), attempt=2)
    assert isinstance(error, RankFailed)
    lines = str(error).splitlines()
    assert lines[0] == "rank 1 of 4 on n1 raised ValueError: bad"
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[-2] == (
        "Stopped as a consequence: ranks 0, 2-3 "
        "(rank 0: at a.py:3 in step; ranks 2-3: at b.py:9 in f)"
    )
    assert lines[-1].startswith("HINT: ")
    assert lines[-1].endswith("logs are in /logs")
    assert (error.rank, error.host, error.attempt, error.job_dir) == (1, "n1", 2, "/logs")
    assert isinstance(error.__cause__, ValueError)
    assert error.waiting == {0: "a.py:3 in step", 2: "b.py:9 in f", 3: "b.py:9 in f"}
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.rank, str(copy)) == (1, str(error))


def test_what_a_rank_says_after_it_was_stopped_does_not_make_it_the_cause_but_tells_its_place():
    late = known(0)
    late.note("stopped")
    late.take({"state": "failed", "failed": report("lost", consequence=True, site="a.py:3 in f")})
    error = failure([late, known(1, failed=report())])
    assert (error.rank, late.state) == (1, "stopped")
    assert (error.waiting, error.consequences) == ({0: "a.py:3 in f"}, {0: "lost"})


def test_remote_frames_are_shown_once_when_the_exception_could_not_travel():
    error = failure([known(0, failed=report())])
    assert "Traceback" not in str(error)
    assert isinstance(error.__cause__, RemoteError)
    assert "Traceback" in str(error.__cause__)


@pytest.mark.parametrize(
    ("exit_code", "words", "attributes"),
    [
        (7, "exited with code 7", (7, None)),
        (0, "exited with code 0 before returning", (0, None)),
        (-9, "killed by SIGKILL", (None, "SIGKILL")),
        (-7, "killed by SIGBUS", (None, "SIGBUS")),
        (-11, "killed by SIGSEGV", (None, "SIGSEGV")),
        (-64, "killed by SIGRTMAX", (None, "SIGRTMAX")),
    ],
)
def test_a_silent_death_says_how_and_shows_the_log(exit_code, words, attributes, tmp_path):
    (tmp_path / "rank-0.log").write_text("last\nwords\n")
    states = [known(0, exit_code=exit_code, peak_mb=100.0), known(1)]
    error = failure(states, tmp_path)
    assert isinstance(error, RankFailed)
    assert words in str(error).splitlines()[0]
    assert "  last\n  words" in str(error)
    assert (error.exit_code, error.signal) == attributes
    hint = str(error).splitlines()[-1]
    assert ("memory" in hint) == (exit_code == -9)
    assert ("/dev/shm" in hint) == (exit_code == -7)


def test_a_negative_code_of_sys_exit_is_not_a_signal():
    error = failure([known(0, failed=report("SystemExit: -9", code=-9))])
    assert isinstance(error, RankFailed)
    assert (error.exit_code, error.signal) == (-9, None)


def test_a_collective_that_ran_out_of_time_stays_a_timeout():
    original = RankTimeout("barrier timed out", missing=[1], op="barrier", stacks={1: "there"})
    states = [known(0, failed=report("RankTimeout", consequence=True, error=original)), known(1)]
    error = failure(states)
    assert isinstance(error, RankTimeout)
    assert (error.rank, error.op, error.stacks) == (1, "barrier", {1: "there"})


def test_a_deadline_prints_equal_stacks_once_and_the_suspect_first():
    same = 'Thread 0x00007f00000000{0} (most recent call first):\n  File "a.py", line 1 in wait'
    stacks = {0: same.format("01"), 1: "elsewhere", 2: same.format("02")}
    states = [known(rank, stack=stacks.get(rank, "")) for rank in range(4)]
    states[1].standing = Standing(call="barrier #1 (done)", group="world", number=1)
    states[0].standing = states[2].standing = Standing(call="sum #2", group="world", number=2)
    error = judge(states, ending("timeout", deadline="not done in time"), Path("/logs"))
    text = str(error)
    assert text.index("--- rank 1\n") < text.index("--- ranks 0, 2\n")
    assert text.count("in wait") == 1
    assert "No stack from rank 3" in text
    assert (error.rank, sorted(error.stacks)) == (1, [0, 1, 2])


def test_an_import_that_can_be_served_gets_the_option_that_does_it():
    absent = report("ModuleNotFoundError: No module named 'fairchem.core'")
    assert "HINT: unisono run --compat fairchem ..." in str(failure([known(0, failed=absent)]))
    other = report("ModuleNotFoundError: No module named 'heater'")
    assert "--compat" not in str(failure([known(0, failed=other)]))


def test_ranks_in_different_calls_are_all_named_with_their_lines():
    halves = [report(f"CollectiveMismatch: {r}", site=f"train.py:{r} in step") for r in range(2)]
    states = [
        known(rank, failed=replace(half, is_mismatch=True), failed_at=float(rank))
        for rank, half in enumerate(halves)
    ]
    text = str(failure([*states, known(2, stack=STACK.format(9)), known(3)]))
    assert (
        "The ranks do not make the same calls:\n"
        "  rank 0: train.py:0 in step\n"
        "  rank 1: train.py:1 in step\n"
        "  rank 2: b.py:9 in f\n"
        "  rank 3: in no call of the group any more\n"
    ) in text
    assert "HINT: different numbers of batches?" in text


@pytest.mark.parametrize("reports", [1, 2])
def test_ranks_that_differ_in_the_same_call_are_not_said_to_make_different_ones(reports):
    """Whether all who disagree have reported, or one still stands there; and others elsewhere."""
    error = CollectiveMismatch("other bytes", {0: "12 bytes", 1: "16 bytes"})
    half = replace(report("other bytes", error=error, site="b.py:9 in f"), is_mismatch=True)
    there = known(1, failed=half) if reports == 2 else known(1, stack=STACK.format(9))
    states = [known(0, failed=half), there, known(2, stack=STACK.format(3)), known(3)]
    text = str(failure(states, Path("/logs")))
    assert "do not make the same calls" not in text
    assert text.splitlines()[-1] == "HINT: logs are in /logs"


STACK = 'Current thread 0x00007f01 (most recent call first):\n  File "b.py", line {} in f'
