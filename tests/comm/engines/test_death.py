"""What the others see when a rank is killed, hangs, raises, forks or leaves."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("mortal_ranks.py")
VICTIM = 1
KILLED = [
    "killed_while_copying_in",
    "killed_between_meetings",
    "killed_while_others_wait_in_the_background",
    "killed_while_idle",
    "killed_before_its_message",
    "killed_while_ddp_waits",
]


@pytest.fixture(scope="module")
def mortal_world(interpreter):
    """Run a case of `mortal_ranks.py` and return what its ranks report."""
    process = subprocess.Popen(
        [interpreter.python, "-W", "ignore", str(SCRIPT)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"

    def run(case, size=3, reap=False):
        process.stdin.write(json.dumps({"case": case, "size": size, "reap": reap}) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    yield run
    process.stdin.close()
    assert process.wait(timeout=20) == 0
    process.stdout.close()


def named_segments():
    return sorted(path.name for path in Path("/dev/shm").glob("unisono-*"))


@pytest.mark.parametrize("case", KILLED)
def test_survivors_name_the_killed_rank_within_two_seconds_and_keep_nothing(mortal_world, case):
    before = named_segments()
    reports = mortal_world(case)  # the killed rank is a zombie meanwhile
    assert reports[VICTIM] is None
    for report in (reports[0], reports[2]):
        assert report["error"] in ("RankFailed", "RuntimeError"), report
        assert "rank 1" in report["text"]
        assert "died" in report["text"]
        assert report["seconds"] < 2
        assert report["again"]["seconds"] < 0.1
        assert "first cause" in report["again"]["text"]
        assert report["left"]["threads"] == 1
        assert report["left"]["segments"] == 0
    assert named_segments() == before


def test_a_killed_rank_that_was_collected_is_noticed_too(mortal_world):
    for report in mortal_world("killed_while_idle", reap=True)[::2]:
        assert (report["error"], report["rank"]) == ("RankFailed", VICTIM)


def test_a_rank_killed_while_the_group_is_made(mortal_world):
    for report in mortal_world("killed_in_set_up")[::2]:
        assert (report["error"], report["rank"]) == ("RankFailed", VICTIM)
        assert "while the group was made" in report["text"]
        assert report["seconds"] < 2
        assert report["left"]["segments"] == 0


def test_nobody_waits_for_a_dead_rank_at_the_end_of_the_world(mortal_world):
    for report in mortal_world("killed_before_the_world_is_closed")[::2]:
        assert report["error"] is None
        assert report["seconds"] < 3  # a world that is well has five seconds, twice
        assert report["left"]["threads"] == 1


def test_an_exception_during_a_wait_reaches_all_ranks_with_its_traceback(mortal_world):
    first, broken, last = mortal_world("one_rank_raises_during_a_wait")
    assert broken["error"] == "ZeroDivisionError"
    for report in (first, last):
        assert (report["error"], report["rank"]) == ("RankFailed", VICTIM)
        assert "ZeroDivisionError: a bug during a wait" in report["text"]
        assert report["seconds"] < 2


def test_a_rank_that_leaves_is_named(mortal_world):
    for report in mortal_world("one_rank_leaves_without_a_word")[::2]:
        assert report["error"] == "RankFailed"
        assert "rank 1 has closed the group" in report["text"]


def test_a_slow_rank_is_no_failure_and_waiting_for_it_costs_little(mortal_world):
    for report in mortal_world("one_rank_is_slow"):
        assert report["error"] is None
        assert report["cpu"] < 0.3  # of 1.5 seconds


def test_a_deadline_names_who_is_missing(mortal_world):
    for report in mortal_world("one_rank_never_comes")[::2]:
        assert report["error"] == "RankTimeout"
        assert report["missing"] == [VICTIM]
        assert 0.4 < report["seconds"] < 1.5


def test_a_forked_child_cannot_use_the_group_and_harms_nobody(mortal_world):
    reports = mortal_world("one_rank_forks")
    assert [report["sum"] for report in reports] == [[3.0, 3.0]] * 3
    assert not reports[VICTIM]["speaks for its parent"]
    for attempt in reports[VICTIM]["child"]:
        assert attempt["error"] == "UnisonoError"
        assert "forked from rank 1" in attempt["text"]


def test_different_calls_are_named_on_all_ranks(mortal_world):
    for report in mortal_world("calls_differ"):
        assert report["error"] == "CollectiveMismatch"
        assert "rank 0: barrier() of 0 bytes" in report["text"]
        assert "rank 1: broadcast(float32, root 0) of 16 bytes" in report["text"]
        assert report["again"]["error"] == "CollectiveMismatch"


def test_different_sizes_are_named_on_all_ranks(mortal_world):
    for report in mortal_world("sizes_differ"):
        assert report["error"] == "CollectiveMismatch"
        for rank in range(3):
            assert (
                f"rank {rank}: all_reduce(sum, float32) of {4 * (40_000 + rank)} bytes"
                in (report["text"])
            )
