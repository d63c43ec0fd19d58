"""Ctrl-C, TERM and KILL of the launcher leave no rank behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

SCRIPT = """
import os, subprocess, time, unisono
from pathlib import Path

def wait(folder):
    child = subprocess.Popen(["sleep", "600"], start_new_session=%r)
    rank = unisono.world().rank
    Path(folder, f"pids-{rank}.tmp").write_text(f"{os.getpid()} {child.pid}")
    Path(folder, f"pids-{rank}.tmp").rename(Path(folder, f"pids-{rank}"))
    try:
        time.sleep(600)
    finally:
        Path(folder, f"finally-{rank}").touch()

%s
"""


def wait_until(condition, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


RUN, SUBMIT = "unisono.run(wait, {0!r}, ranks=2)", "unisono.submit(wait, {0!r}, ranks=2).wait()"


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_no_rank_and_no_directory_outlives_its_launcher(tmp_path, has_ended):
    cases = [
        (signal.SIGINT, RUN, False),
        (signal.SIGTERM, RUN, True),
        (signal.SIGKILL, RUN, True),
        (signal.SIGINT, SUBMIT, False),
        (signal.SIGTERM, SUBMIT, False),
    ]
    launchers = []
    try:
        for number, (_, call, is_apart) in enumerate(cases):
            folder = tmp_path / str(number)
            folder.mkdir()
            script = SCRIPT % (is_apart, call.format(str(folder)))
            launchers.append(
                subprocess.Popen(
                    [sys.executable, "-c", script],
                    env={**os.environ, "TMPDIR": str(folder)},
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        for number, (order, call, _) in enumerate(cases):
            folder, launcher = tmp_path / str(number), launchers[number]
            ready = wait_until(lambda folder=folder: len(list(folder.glob("pids-?"))) == 2, 90)
            assert ready, "the ranks did not start"
            launcher.send_signal(order)
            _, errors = launcher.communicate(timeout=30)
            files = folder.glob("pids-?")
            pids = [int(pid) for file in files for pid in file.read_text().split()]
            assert all(map(has_ended, pids)), "ranks or their children live"
            assert launcher.returncode == -order, errors
            empty = wait_until(lambda folder=folder: not list(folder.glob("unisono-*")), 10)
            assert empty, f"{order!r} leaves a directory behind"
            if order == signal.SIGINT or (order == signal.SIGTERM and call is RUN):
                assert len(list(folder.glob("finally-?"))) == 2
    finally:
        for launcher in launchers:
            launcher.kill()
            launcher.wait()
