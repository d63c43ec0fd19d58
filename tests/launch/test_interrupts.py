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
    child = subprocess.Popen(["sleep", "600"])
    rank = unisono.world().rank
    Path(folder, f"pids-{rank}.tmp").write_text(f"{os.getpid()} {child.pid}")
    Path(folder, f"pids-{rank}.tmp").rename(Path(folder, f"pids-{rank}"))
    try:
        time.sleep(600)
    finally:
        Path(folder, f"finally-{rank}").touch()

unisono.run(wait, %r, ranks=2)
"""


def wait_until(condition, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_rank_outlives_its_launcher(number, tmp_path, has_ended):
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    launcher = subprocess.Popen(
        [sys.executable, "-c", SCRIPT % str(tmp_path)], env=env, stderr=subprocess.PIPE, text=True
    )
    try:
        ready = wait_until(lambda: len(list(tmp_path.glob("pids-?"))) == 2, 60)
        assert ready, "the ranks did not start"
        launcher.send_signal(number)
        _, errors = launcher.communicate(timeout=20)
        pids = [int(pid) for file in tmp_path.glob("pids-?") for pid in file.read_text().split()]
        assert all(map(has_ended, pids)), "ranks or their children live"
        assert launcher.returncode == -number, errors
        if number != signal.SIGKILL:
            assert len(list(tmp_path.glob("finally-?"))) == 2
            assert list(tmp_path.glob("unisono-*")) == []
    finally:
        launcher.kill()
        launcher.wait()
