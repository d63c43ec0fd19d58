"""A session that is interrupted or killed takes all its ranks and files with it."""

from __future__ import annotations

import signal
import time

import pytest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_the_session(begin_session, number):
    session = begin_session("endless")
    started = [session.directory / "endless" / f"started{rank}" for rank in (0, 1)]
    deadline = time.monotonic() + 30
    while not all(file.exists() for file in started):
        assert time.monotonic() < deadline, "the ranks did not start"
        assert session.process.poll() is None, session.finish().output
        time.sleep(0.05)
    assert len(session.left_processes(patience_s=0)) >= 4
    session.process.send_signal(number)
    session.finish(timeout_s=30)
    assert session.left_processes() == []
    assert session.left_files() == []
    if number == signal.SIGINT:
        assert "KeyboardInterrupt" in session.output
