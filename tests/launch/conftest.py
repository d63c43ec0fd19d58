"""Launch tests are watched for leaks; failed runs leave their logs in the test's directory."""

from __future__ import annotations

import sys
import tempfile

import pytest
from tests.waiting import is_running, wait_until


@pytest.fixture(autouse=True)
def watched(warm_python, hygiene, tmp_path, tmp_path_factory, monkeypatch):
    """Keep the directories of failed runs below `tmp_path`, and the links to jobs beside it.

    The warm interpreter is there before, so that it is no leak of the first test that needs it.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))


@pytest.fixture(autouse=True)
def spawned_ranks_are_forks(watched, request, monkeypatch):
    """Let ranks of the case "spawn" be forks of the warm interpreter, not of an empty one."""
    cases = getattr(request.node, "callspec", None)
    is_case = cases is not None and cases.params.get("spawn_method") == "spawn"
    if is_case and "real_interpreters" not in request.fixturenames:
        monkeypatch.setattr(sys, "executable", request.getfixturevalue("forked_python"))


@pytest.fixture
def real_interpreters():
    """For tests that look at the whole stack of a rank, of which a fork has more."""


@pytest.fixture
def has_ended():
    """Return a function that tells whether a process ends within twenty seconds."""

    return lambda pid: wait_until(lambda: not is_running(pid), 20.0)
