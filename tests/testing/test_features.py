"""Fixtures, parameters, outcomes, warnings, output: a test on ranks is a pytest test."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.fixture
def session(ordinary_session):
    return ordinary_session


PASSING = [
    "test_list_of_counts_with_parameters[1ranks-2]",
    "test_list_of_counts_with_parameters[1ranks-5]",
    "test_list_of_counts_with_parameters[3ranks-2]",
    "test_list_of_counts_with_parameters[3ranks-5]",
    "test_fixtures_of_plain_data_and_own_classes",
    "test_modules_next_to_the_tests_can_be_used",
    "test_environment_and_directory_are_those_of_the_test",
    "test_monkeypatch_works_in_the_rank",
    "test_monkeypatch_was_undone",
    "test_settings_are_changed",
    "test_settings_were_put_back",
    "test_generators_are_seeded_alike_each_time",
    "test_raises_works",
    "test_warning_filters_hold_in_the_ranks",
    "test_globals_start_afresh_a",
    "test_globals_start_afresh_b",
    "test_method",
    "test_method_of_marked_class",
    "test_returning_something_odd_is_no_failure",
    "test_pool_gives_values",
    "test_without_marker_runs_here",
]


@pytest.mark.parametrize("name", PASSING)
def test_passes(session, name):
    assert session[name].outcome == "passed", session[name].text


def test_fixture_that_cannot_travel_is_named(session):
    case = session["test_fixture_that_cannot_travel"]
    assert case.outcome == "failed"
    assert case.lines[0].startswith("fixture 'lock' of test_fixture_that_cannot_travel is needed")
    assert "HINT: make it inside test_fixture_that_cannot_travel" in case.text


def test_global_that_cannot_travel_is_named(session):
    case = session["test_global_that_cannot_travel"]
    assert case.lines[0] == "test_global_that_cannot_travel uses the global 'GLOBAL_LOCK'"


def test_asserts_of_conftest_keep_their_messages(session):
    case = session["test_functions_of_conftest_keep_their_messages"]
    assert case.outcome == "failed"
    assert "AssertionError: from conftest" in case.text
    assert "assert -1 > 0" in case.text


def test_skip_on_all_ranks_is_a_skip(session):
    case = session["test_skip_on_all_ranks"]
    assert case.outcome == "skipped"
    assert "not today" in case.text
    assert "test_features.py" in case.text


def test_skip_on_one_rank_is_a_failure(session):
    case = session["test_skip_on_one_rank"]
    assert case.outcome == "failed"
    assert case.lines[0] == "1 of 2 ranks raised, 1 returned"
    assert "Skipped: only here" in case.text


@pytest.mark.parametrize("name", ["test_xfail_on_all_ranks", "test_marked_as_failing"])
def test_expected_failure(session, name):
    assert session[name].outcome == "xfailed"


def test_output_is_shown_with_its_rank(session):
    text = session["test_output_is_shown_with_its_rank"].text
    for line in ("[rank 0] hello", "[rank 1] hello", "[rank 0] from below"):
        assert line in text


def test_marker_on_a_unittest_method_is_refused(session):
    case = session["test_method_of_test_case"]
    assert case.outcome == "error"
    assert "HINT: write it as a function" in case.text


def test_passing_tests_share_their_ranks(session):
    # Only the three tests that failed took their 2 ranks with them.
    assert "starts 6" in session["test_ranks_were_shared"].text


def test_test_modules_travel_in_either_import_mode(watched_session):
    # Neither the test module nor its conftest can be imported by name there.
    session = watched_session
    assert session["test_fixtures_of_plain_data_and_own_classes"].outcome == "passed"
    assert session["test_modules_next_to_the_tests_can_be_used"].outcome == "passed"
    assert "from conftest" in session["test_functions_of_conftest_keep_their_messages"].text


def test_loading_the_plugin_imports_no_torch():
    code = (
        "import sys, unisono.testing.plugin; print([m in sys.modules for m in ('torch', 'numpy')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[False, False]"
