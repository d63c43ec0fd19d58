"""Launch tests are watched for leaks; failed runs leave their logs in the test's directory."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def watched(hygiene, tmp_path, tmp_path_factory, monkeypatch):
    """Keep the directories of failed runs below `tmp_path`, and the links to jobs beside it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))


@pytest.fixture(autouse=True)
def spawned_ranks_are_forks(watched, request, monkeypatch):
    """Let ranks of the case "spawn" be forks of the warm interpreter, not of an empty one."""
    cases = getattr(request.node, "callspec", None)
    if cases is not None and cases.params.get("spawn_method") == "spawn":
        monkeypatch.setattr(sys, "executable", request.getfixturevalue("forked_python"))


@pytest.fixture
def has_ended():
    """Return a function that tells whether a process ends within twenty seconds."""

    def is_running(pid: int) -> bool:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        return state != "Z"  # ended, and its parent has not looked yet

    def has_ended(pid: int) -> bool:
        end = time.monotonic() + 20.0
        while is_running(pid):
            if time.monotonic() > end:
                return False
            time.sleep(0.02)
        return True

    return has_ended
