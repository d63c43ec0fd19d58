"""Logs: which ranks are shown; a disk that is full."""

from __future__ import annotations

import subprocess

from unisono.launch.logs import Logs

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


def test_the_console_shows_all_ranks_of_small_worlds():
    assert Logs().shown(8) == frozenset(range(8))
    assert Logs().shown(9) == {0}
    assert Logs(console="all").shown(9) == frozenset(range(9))
    assert Logs(console="none").shown(2) == frozenset()
    assert Logs(console=[1]).shown(2) == {1}
