"""What pytest tells of tests on ranks: fixtures, outcomes, draws, failures, leaks, case by case.

The tests themselves are in `sessions/`, and their names say what they do.
"""

from __future__ import annotations

import subprocess
import sys
from typing import NamedTuple

import pytest
import torch.distributed as dist
from tests.waiting import scaled_by_load

from unisono.testing.leaks import Holdings


class Told(NamedTuple):
    """What is told of a test that does not simply pass."""

    first: str = ""
    """First line, or the beginning of it."""
    also: tuple[str, ...] = ()
    """What follows somewhere."""
    outcome: str = "failed"
    seconds: float = 60.0
    """At most."""
    never: str = "unisono/testing/"
    """What is not told."""


FAILING = {
    "test_one_rank_asserts_and_the_others_wait": Told(
        "1 of 4 ranks raised, 3 still waiting",
        (
            "---- rank 2 raised",
            "assert values == [1, 2, 3]",
            "AssertionError: assert [1, 2, 5] == [1, 2, 3]",
            "At index 2 diff: 5 != 3",
            "---- ranks 0-1, 3 still waiting after",
            "1 s after rank 2 had failed",
            "`barrier()`",
            "---- rank 3 printed",
            "rank 3 was here",
        ),
        seconds=5,
    ),
    "test_all_ranks_assert_the_same": Told(
        "3 of 3 ranks raised", ("---- ranks 0-2 raised", "assert 3.0 == 4")
    ),
    "test_one_rank_exits_with_7": Told(
        "2 of 3 ranks raised, 1 died (exit code 7)", ("---- rank 1 died: exit code 7",), seconds=5
    ),
    "test_one_rank_kills_itself": Told(
        "1 of 2 ranks died (killed by SIGKILL), 1 still waiting", ("time.sleep(100)",), seconds=5
    ),
    "test_one_rank_reads_address_0": Told(
        "1 of 2 ranks died (killed by SIGSEGV), 1 returned",
        ("Fatal Python error: Segmentation fault", "ctypes.string_at(0)"),
    ),
    "test_one_rank_sleeps_for_ever": Told(
        "", ("---- rank 1 still waiting", "time.sleep(1000)"), seconds=4
    ),
    "test_one_rank_is_in_an_endless_c_call": Told(
        "1 of 2 ranks still waiting, 1 returned",
        ('re.match(r"(a+)+$", "a" * 64 + "b")',),
        seconds=3,
    ),
    "test_one_rank_is_stopped": Told(
        "1 of 2 ranks still waiting, 1 returned", ("did not answer",), seconds=4
    ),
    "test_a_stalled_rank_has_children_and_shared_memory": Told("", ("segment True",)),
    "test_unknown_exception_types_travel": Told(
        "2 of 2 ranks raised", ("KeyError: 'cause'", "direct cause", "Odd: this and that")
    ),
    "test_system_exit_is_a_failure": Told("2 of 2 ranks raised", ("SystemExit: 3",)),
    "test_backend_that_does_not_exist": Told(
        "2 of 2 ranks raised, while joining the process group", ("no-such-backend",)
    ),
}
FEATURES = {
    "test_fixture_that_cannot_travel": Told(
        "argument 'lock' of test_fixture_that_cannot_travel is needed",
        ("HINT: make it inside test_fixture_that_cannot_travel",),
    ),
    "test_global_that_cannot_travel": Told(
        "test_global_that_cannot_travel uses the global 'GLOBAL_LOCK'"
    ),
    "test_functions_of_conftest_keep_their_messages": Told(
        "2 of 2 ranks raised", ("AssertionError: from conftest", "assert -1 > 0")
    ),
    "test_skip_on_all_ranks": Told("", ("not today", "test_features.py"), outcome="skipped"),
    "test_skip_on_one_rank": Told("1 of 2 ranks raised, 1 returned", ("Skipped: only here",)),
    "test_xfail_on_all_ranks": Told(outcome="xfailed"),
    "test_marked_as_failing": Told(outcome="xfailed"),
    "test_method_of_test_case": Told("", ("HINT: write it as a function",), outcome="error"),
    "test_output_is_shown_with_its_rank": Told(
        "", ("[rank 0] hello", "[rank 1] hello", "[rank 0] from below"), outcome="passed"
    ),
    # Only ranks that failed were started again, as far as the next tests needed them.
    "test_ranks_were_started_when_needed_only": Told("", ("starts 28",), outcome="passed"),
    "test_ranks_were_shared": Told("", ("starts 6",), outcome="passed"),
}
DRAWN = {
    "test_all_ranks_get_the_same_values": Told(outcome="passed", seconds=8),  # 50 in one group
    "test_failure_is_shrunk": Told(
        "1 of 2 ranks raised, 1 returned",
        (
            "assert (100 < 100 or 1 == 0)",
            "test_failure_is_shrunk(\n    n=100,\n    flag=False,\n)",
        ),
    ),
    "test_stall_is_told_with_its_example": Told(
        "1 of 2 ranks still waiting, 1 returned",
        ("Stalled example (not shrunk): test_stall_is_told_with_its_example(n=",),
        seconds=5,
    ),
    "test_explicit_example_is_run": Told("", ("assert 77 != 77",)),
    "test_interactive_data_cannot_travel": Told("", ("argument 'data' of",)),
}
ORDINARY = FAILING | FEATURES | DRAWN
LEFT = {
    "variable": "environment: LEAKED=1",
    "thread": "threads: leaked-thread (daemon)",
    "process": "(sleep 60)",
    "file": "leaked-file",
    "shared_memory": "shared memory: /dev/shm/",
    "temporary": "unisono-leaked",
}
_HERE, _THERE = "the test left things behind", "the test left things behind on its ranks\nrank 1:\n"
WATCHED = {
    **{f"test_plain[{what}]": Told(_HERE, (LEFT[what],), "error") for what in LEFT},
    **{
        f"test_one_rank[{what}]": Told(_THERE, (LEFT[what],), never="rank 0")
        for what in list(LEFT)[:4]
    },
    **{f"test_host[{what}]": Told(_HERE, (LEFT[what],), "error") for what in list(LEFT)[4:]},
    "test_setting": Told("", ("settings: default dtype: torch.float32 -> torch.float64",)),
    "test_other_kinds_are_still_found": Told(_HERE, ("leaked-thread",), "error"),
    "test_failure_is_told_once": Told("", ("ValueError: first",), never="left things behind"),
    # Neither the test module nor its conftest can be imported by name in this session.
    "test_functions_of_conftest_keep_their_messages": Told("", ("from conftest",)),
}


def check(case, told):
    assert case.outcome == told.outcome, case.text
    assert case.text.startswith(told.first), case.text
    assert all(text in case.text for text in told.also), case.text
    assert told.never not in case.text
    assert case.seconds < scaled_by_load(told.seconds)


@pytest.mark.parametrize("name", ORDINARY)
def test_it_is_told(ordinary_session, name):
    check(ordinary_session[name], ORDINARY[name])


@pytest.mark.parametrize("name", WATCHED)
def test_it_is_told_with_hygiene(watched_session, name):
    check(watched_session[name], WATCHED[name])


def test_all_other_tests_pass(ordinary_session, watched_session):
    for session, told, count in ((ordinary_session, ORDINARY, 30), (watched_session, WATCHED, 6)):
        others = {n: case for n, case in session.cases.items() if n not in told}
        assert len(others) >= count, sorted(others)
        assert {n: case.text for n, case in others.items() if case.outcome != "passed"} == {}


def test_equal_tracebacks_are_shown_once_and_the_summary_names_the_first_error(ordinary_session):
    text = ordinary_session["test_all_ranks_assert_the_same"].text
    assert text.count("AssertionError: the total is wrong") == 1
    wanted = "test_all_ranks_assert_the_same - 3 of 3 ranks raised: AssertionError: the total is"
    assert wanted in ordinary_session.output


def test_no_process_and_no_file_is_left(ordinary_session, watched_session):
    for session in (ordinary_session, watched_session):
        assert session.left_processes() == []
        assert session.left_files() == []


def test_process_group_left_open_is_named(tmp_path):
    before = Holdings.now(["groups"])
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert before.new(patience_s=0) == {"groups": ["default process group (gloo)"]}
    finally:
        dist.destroy_process_group()
    assert before.new() == {}


def test_loading_the_plugin_imports_no_torch():
    code = (
        "import sys, unisono.testing.plugin; print([m in sys.modules for m in ('torch', 'numpy')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[False, False]"
