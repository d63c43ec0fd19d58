"""A rank that raises, dies or stalls: one report in time, later tests run, nothing is left."""

from __future__ import annotations

import pytest


@pytest.fixture
def session(ordinary_session):
    return ordinary_session


def test_assert_message_of_a_rank_shows_the_values_and_where_the_others_wait(session):
    case = session["test_one_rank_asserts_and_the_others_wait"]
    assert case.outcome == "failed"
    assert case.lines[0] == "1 of 4 ranks raised, 3 still waiting"
    assert "---- rank 2 raised" in case.text
    assert "assert values == [1, 2, 3]" in case.text
    assert "AssertionError: assert [1, 2, 5] == [1, 2, 3]" in case.text
    assert "At index 2 diff: 5 != 3" in case.text
    assert "---- ranks 0-1, 3 still waiting after" in case.text
    assert "1 s after rank 2 had failed" in case.text
    assert "    barrier()" in case.text
    assert "---- rank 3 printed" in case.text
    assert "rank 3 was here" in case.text
    assert case.seconds < 5


def test_report_has_no_frames_of_the_bench(session):
    for name, case in session.cases.items():
        assert "unisono/testing/" not in case.text, name


def test_summary_line_names_the_first_error(session):
    wanted = "test_all_ranks_assert_the_same - 3 of 3 ranks raised: AssertionError: the total is"
    assert wanted in session.output


def test_equal_tracebacks_are_shown_once(session):
    case = session["test_all_ranks_assert_the_same"]
    assert case.lines[0] == "3 of 3 ranks raised"
    assert "---- ranks 0-2 raised" in case.text
    assert case.text.count("AssertionError: the total is wrong") == 1
    assert "assert 3.0 == 4" in case.text


def test_exit_code_of_a_dead_rank_is_told(session):
    case = session["test_one_rank_exits_with_7"]
    assert case.lines[0] == "2 of 3 ranks raised, 1 died (exit code 7)"
    assert "---- rank 1 died: exit code 7" in case.text
    assert case.seconds < 5


def test_signal_that_killed_a_rank_is_told_at_once(session):
    case = session["test_one_rank_kills_itself"]
    assert case.lines[0] == "1 of 2 ranks died (killed by SIGKILL), 1 still waiting"
    assert "time.sleep(100)" in case.text
    assert case.seconds < 5


def test_crash_shows_the_stack_of_the_rank_that_crashed(session):
    case = session["test_one_rank_reads_address_0"]
    assert case.lines[0] == "1 of 2 ranks died (killed by SIGSEGV), 1 returned"
    assert "Fatal Python error: Segmentation fault" in case.text
    assert "ctypes.string_at(0)" in case.text


def test_rank_that_sleeps_for_ever_is_named_after_the_deadline(session):
    case = session["test_one_rank_sleeps_for_ever"]
    assert case.outcome == "failed"
    assert "---- rank 1 still waiting" in case.text
    assert "time.sleep(1000)" in case.text
    assert case.seconds < 4


def test_rank_in_an_endless_c_call_is_named_after_the_deadline(session):
    case = session["test_one_rank_is_in_an_endless_c_call"]
    assert case.lines[0] == "1 of 2 ranks still waiting, 1 returned"
    assert 're.match(r"(a+)+$", "a" * 64 + "b")' in case.text
    assert case.seconds < 3


def test_stopped_rank_is_named_and_killed(session):
    case = session["test_one_rank_is_stopped"]
    assert case.lines[0] == "1 of 2 ranks still waiting, 1 returned"
    assert "did not answer" in case.text
    assert case.seconds < 4


def test_children_and_shared_memory_of_a_killed_rank_are_gone(session):
    case = session["test_a_stalled_rank_has_children_and_shared_memory"]
    assert "segment True" in case.text
    assert session.left_files() == []


def test_cause_of_an_exception_is_shown_and_its_type_need_not_travel(session):
    case = session["test_unknown_exception_types_travel"]
    assert "KeyError: 'cause'" in case.text
    assert "direct cause" in case.text
    assert "Odd: this and that" in case.text


def test_system_exit_in_a_test_is_a_failure(session):
    assert "SystemExit: 3" in session["test_system_exit_is_a_failure"].text


def test_group_that_cannot_be_made_is_told(session):
    case = session["test_backend_that_does_not_exist"]
    assert case.lines[0] == "2 of 2 ranks raised, while joining the process group"
    assert "no-such-backend" in case.text


@pytest.mark.parametrize(
    "name",
    [
        "test_after_an_assert",
        "test_after_an_exit",
        "test_after_a_kill",
        "test_after_stalls",
        "test_after_everything[1ranks]",
        "test_after_everything[2ranks]",
        "test_after_everything[4ranks]",
    ],
)
def test_the_next_test_passes(session, name):
    assert session[name].outcome == "passed"


def test_only_ranks_that_failed_were_started_again(session):
    # The ranks of each failed world, as far as the next ones needed them.
    assert "starts 28" in session["test_ranks_were_started_when_needed_only"].text


def test_no_process_and_no_file_is_left(session):
    assert session.left_processes() == []
    assert session.left_files() == []
