"""Logs: which ranks are shown; a disk that is full, and logs that would fill it."""

from __future__ import annotations

import io
import subprocess

import pytest

from unisono.errors import PlatformError
from unisono.launch.logs import Console, LogFollower, Logs, RankLog

SCRIPT = """
import resource, sys, warnings
import unisono

warnings.simplefilter("always")
# A write beyond this fails, as on a full disk.
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

def work():
    for _ in range(40):
        print("x" * 100_000)
    return unisono.world().rank

results = unisono.run(work, ranks=2, logs=unisono.Logs(console="none"))
assert list(results) == [0, 1], results
print("returned")
"""


def test_a_full_disk_does_not_end_a_run_and_is_told_once_for_each_rank(forked_python, tmp_path):
    done = subprocess.run(
        [forked_python, "-c", SCRIPT],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "returned\n"
    assert done.stderr.count("takes no more output (File too large); the run goes on") == 2


@pytest.mark.parametrize("every", [40, 110])
def test_a_log_that_grows_too_large_keeps_its_end(tmp_path, monkeypatch, every):
    """Whoever follows it sees all, also where the new log is longer than what was read before."""
    monkeypatch.setenv("UNISONO_LOG_MB", str(2000 / 2**20))
    path = tmp_path / "rank-0.log"
    log, shown = RankLog(path), io.StringIO()
    follower = LogFollower(tmp_path, Console([0], prefix=False, stdout=shown), [0])
    for number in range(500):
        log.write(f"line {number:04}\n".encode())
        if number % every == 0:
            follower.look()
    log.close()
    follower.close()
    old = path.with_name("rank-0.log.old")
    assert path.stat().st_size <= 1000
    assert old.stat().st_size <= 1000
    assert (old.read_text() + path.read_text()).endswith("line 0498\nline 0499\n")
    assert path.stat().st_mode & 0o077 == 0
    assert shown.getvalue().splitlines() == [f"line {number:04}" for number in range(500)]


def test_a_size_that_is_none_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("UNISONO_LOG_MB", "much")
    with pytest.raises(PlatformError, match="UNISONO_LOG_MB=much"):
        RankLog(tmp_path / "rank-0.log")


def test_the_console_shows_all_ranks_of_small_worlds():
    assert Logs().shown(8) == frozenset(range(8))
    assert Logs().shown(9) == {0}
    assert Logs(console="all").shown(9) == frozenset(range(9))
    assert Logs(console="none").shown(2) == frozenset()
    assert Logs(console=[1]).shown(2) == {1}
