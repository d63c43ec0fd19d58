"""A session that is interrupted or killed takes all its ranks and files with it."""

from __future__ import annotations

import signal
import subprocess
import time

import pytest
from tests.conftest import be_heard


def wait_for_ranks(session):
    started = [session.directory / "endless" / f"started{rank}" for rank in (0, 1)]
    deadline = time.monotonic() + 60
    while not all(file.exists() for file in started):
        assert time.monotonic() < deadline, "the ranks did not start"
        assert session.process.poll() is None, session.finish().output
        time.sleep(0.05)
    # pytest, the warm process, two ranks, and a child of each
    assert len(session.left_processes(patience_s=0)) == 6


def test_nothing_outlives_a_session_that_is_interrupted_or_killed(begin_session):
    sessions = {number: begin_session("endless") for number in (signal.SIGINT, signal.SIGKILL)}
    for number, session in sessions.items():
        wait_for_ranks(session)
        session.process.send_signal(number)
    for session in sessions.values():
        session.finish(timeout_s=30)
        assert session.left_processes() == []
        assert session.left_files() == []
    assert "KeyboardInterrupt" in sessions[signal.SIGINT].output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_what_a_session_in_the_background_starts_hears_signals_that_it_does_not_hear_itself(number):
    before = signal.signal(number, signal.SIG_IGN)  # as under nohup, or behind a shell's &
    try:
        be_heard()
        signal.raise_signal(number)
        with subprocess.Popen(["sleep", "60"]) as child:
            child.send_signal(number)
            try:
                assert child.wait(20) == -number
            finally:
                child.kill()
    finally:
        signal.signal(number, before)
