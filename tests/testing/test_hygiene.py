"""A test that leaves something behind fails, in the test process and in a rank."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from unisono.testing.leaks import Holdings


@pytest.fixture
def session(watched_session):
    return watched_session


PLAIN = {
    "variable": "environment: LEAKED=1",
    "thread": "threads: leaked-thread (daemon)",
    "process": "(sleep 60)",
    "file": "leaked-file",
    "shared_memory": "shared memory: /dev/shm/",
    "temporary": "unisono-leaked",
}


@pytest.mark.parametrize("what", PLAIN)
def test_leak_of_a_plain_test_is_named(session, what):
    case = session[f"test_plain[{what}]"]
    assert case.outcome == "error", session.output
    assert case.lines[0] == "the test left things behind"
    assert PLAIN[what] in case.text


@pytest.mark.parametrize("what", ["variable", "thread", "process", "file"])
def test_leak_of_one_rank_is_named_with_the_rank(session, what):
    case = session[f"test_one_rank[{what}]"]
    assert case.outcome == "failed", session.output
    assert case.lines[:2] == ["the test left things behind on its ranks", "rank 1:"]
    assert PLAIN[what] in case.text
    assert "rank 0" not in case.text


@pytest.mark.parametrize("what", ["shared_memory", "temporary"])
def test_files_that_a_rank_leaves_on_the_host_are_named(session, what):
    case = session[f"test_host[{what}]"]
    assert case.outcome == "error", case.text
    assert PLAIN[what] in case.text


def test_changed_setting_of_a_rank_is_named(session):
    text = session["test_setting"].text
    assert "settings: default dtype: torch.float32 -> torch.float64" in text


def test_process_group_left_open_is_named(tmp_path):
    before = Holdings.now(["groups"])
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert before.new(patience_s=0) == {"groups": ["default process group (gloo)"]}
    finally:
        dist.destroy_process_group()
    assert before.new() == {}


@pytest.mark.parametrize(
    "name",
    [
        "test_plain[nothing]",
        "test_one_rank[nothing]",
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


def test_nothing_is_looked_at_unless_asked_for(ordinary_session):
    assert ordinary_session["test_settings_are_changed"].outcome == "passed"


def test_nothing_is_left(session):
    assert session.left_processes() == []
    assert session.left_files() == []
