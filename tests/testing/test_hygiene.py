"""A test that leaves something behind fails, in the test process and in a rank."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def session(run_session):
    return run_session("hygiene.py", "-o", "unisono_hygiene=true")


PLAIN = {
    "leak_variable": "environment: LEAKED=1",
    "leak_thread": "threads: leaked-thread (daemon)",
    "leak_process": "(sleep 60)",
    "leak_file": "leaked-file",
    "leak_shared_memory": "shared memory: /dev/shm/",
    "leak_temporary": "unisono-leaked",
}


@pytest.mark.parametrize("leak", PLAIN)
def test_leak_of_a_plain_test_is_named(session, leak):
    case = session[f"test_plain[{leak}]"]
    assert case.outcome == "error", session.output
    assert case.lines[0] == "the test left things behind"
    assert PLAIN[leak] in case.text


@pytest.mark.parametrize("leak", ["leak_variable", "leak_thread", "leak_process", "leak_file"])
def test_leak_of_one_rank_is_named_with_the_rank(session, leak):
    case = session[f"test_one_rank[{leak}]"]
    assert case.outcome == "failed", session.output
    assert case.lines[:2] == ["the test left things behind on its ranks", "rank 1:"]
    assert PLAIN[leak] in case.text
    assert "rank 0" not in case.text


@pytest.mark.parametrize("leak", ["leak_shared_memory", "leak_temporary"])
def test_files_that_a_rank_leaves_on_the_host_are_named(session, leak):
    case = session[f"test_host[{leak}]"]
    assert case.outcome == "error"
    assert PLAIN[leak] in case.text


def test_changed_setting_of_a_rank_is_named(session):
    text = session["test_setting"].text
    assert "settings: default dtype: torch.float32 -> torch.float64" in text


def test_process_group_left_open_is_named(session):
    case = session["test_group"]
    assert case.outcome == "error"
    assert "groups: default process group (gloo)" in case.text


@pytest.mark.parametrize(
    "name",
    [
        "test_plain[leak_nothing]",
        "test_one_rank[leak_nothing]",
        "test_group_of_a_rank_is_not_a_leak",
        "test_allowed",
        "test_allowed_on_ranks",
    ],
)
def test_no_false_alarm(session, name):
    assert session[name].outcome == "passed", session[name].text


def test_allowing_one_kind_does_not_allow_others(session):
    assert "leaked-thread" in session["test_other_kinds_are_still_found"].text


def test_leak_of_a_failing_test_is_not_told_in_addition(session):
    case = session["test_failure_is_told_once"]
    assert case.outcome == "failed"
    assert "ValueError: first" in case.text
    assert "left things behind" not in case.text


def test_nothing_is_looked_at_unless_asked_for(run_session):
    session = run_session("hygiene.py", "-k", "leak_variable")
    assert session["test_plain[leak_variable]"].outcome == "passed"
    assert session["test_one_rank[leak_variable]"].outcome == "passed"
