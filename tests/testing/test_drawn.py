"""hypothesis under `@ranks`: drawn here, run there, shrunk here."""

from __future__ import annotations

import pytest


@pytest.fixture
def session(ordinary_session):
    return ordinary_session


@pytest.mark.parametrize(
    "name",
    [
        "test_all_ranks_get_the_same_values",
        "test_assume_drops_examples",
        "test_parameters_and_fixtures_and_draws[1ranks-3]",
        "test_parameters_and_fixtures_and_draws[2ranks-3]",
        "test_method",
        "test_plain_method_beside_a_drawn_one",
        "test_without_ranks",
    ],
)
def test_passes(session, name):
    assert session[name].outcome == "passed", session[name].text


def test_fifty_examples_share_one_group(session):
    assert session["test_all_ranks_get_the_same_values"].seconds < 8


def test_failure_is_found_and_shrunk_to_the_smallest(session):
    case = session["test_failure_is_shrunk"]
    assert case.lines[0] == "1 of 2 ranks raised, 1 returned"
    assert "assert (100 < 100 or 1 == 0)" in case.text
    assert "test_failure_is_shrunk(\n    n=100,\n    flag=False,\n)" in case.text
    assert "unisono/testing" not in case.text


def test_stall_is_told_once_with_its_example(session):
    case = session["test_stall_is_told_with_its_example"]
    assert case.lines[0] == "1 of 2 ranks still waiting, 1 returned"
    assert "Stalled example (not shrunk): test_stall_is_told_with_its_example(n=" in case.text
    assert case.seconds < 5


def test_explicit_example_runs_on_the_ranks(session):
    case = session["test_explicit_example_is_run"]
    assert case.outcome == "failed"
    assert "assert 77 != 77" in case.text


def test_interactive_draws_are_refused_by_name(session):
    case = session["test_interactive_data_cannot_travel"]
    assert "drawn value or fixture 'data'" in case.text
