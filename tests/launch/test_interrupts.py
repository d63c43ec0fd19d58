"""Ctrl-C, TERM and KILL of the launcher leave no rank behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from tests.waiting import scaled_by_load, wait_until

import unisono
from unisono.errors import RankFailed
from unisono.launch.stopping import signals_of_launcher

SCRIPT = """
import os, subprocess, time, unisono
from pathlib import Path

def wait(folder):
    child = subprocess.Popen(["sleep", "600"], start_new_session=%r)
    rank = unisono.world().rank
    Path(folder, f"pids-{rank}.tmp").write_text(f"{os.getpid()} {child.pid} {os.getppid()}")
    Path(folder, f"pids-{rank}.tmp").rename(Path(folder, f"pids-{rank}"))
    try:
        time.sleep(600)
    finally:
        Path(folder, f"finally-{rank}").touch()

%s
"""
RUN, SUBMIT = "unisono.run({}, ranks=2)", "unisono.submit({}, ranks=2).wait()"
ENDS = {
    "cpu": [
        (signal.SIGINT, RUN, False),
        (signal.SIGTERM, RUN, True),
        (signal.SIGKILL, RUN, True),
        (signal.SIGINT, SUBMIT, False),
        (signal.SIGTERM, SUBMIT, False),
    ],
    "mpi": [(signal.SIGINT, RUN, False), (signal.SIGKILL, RUN, False)],
}
"""What the launcher is sent, what it does, and whether a child is in a session of its own."""
SAVING = """
import os, sys, time, unisono
from pathlib import Path

folder = Path(sys.argv[1])

def note(word):
    rank = unisono.world().rank
    (folder / f"{word}-{rank}").write_text(str(os.getpid()))

def asks():
    note("up")
    while not unisono.should_stop():
        time.sleep(0.05)
    time.sleep(1.5)  # longer than the grace of a rank that failed
    note("saved")
    unisono.requeue()

def catches():
    note("up")
    try:
        time.sleep(600)
    except KeyboardInterrupt:
        assert sys.argv[2] == "late" or unisono.should_stop()
        time.sleep(1.5)
        note("saved")
        raise

def refuses():
    note("up")
    while True:
        try:
            time.sleep(600)
        except KeyboardInterrupt:
            note("asked")

def breaks():
    note("up")
    try:
        time.sleep(600)
    except KeyboardInterrupt:
        raise OSError(f"rank {unisono.world().rank} cannot save")

class Late:  # rank 0 runs while rank 1 is still starting
    def __init__(self):
        self.ranks = 2

    def __setstate__(self, state):
        if unisono.world().rank == 1:
            note("up")
            time.sleep(3)

    def __call__(self):
        if unisono.world().rank == 1:
            return note("called")
        catches()

late = Late()
platform = unisono.Platform(device=sys.argv[3], ranks=2, interrupt_s=20)
unisono.run(globals()[sys.argv[2]], on=platform, max_restarts=3)
print("went on")
"""
QUIET = unisono.Logs(console="none")


on_both = pytest.mark.parametrize("on", ["cpu", pytest.param("mpi", marks=pytest.mark.mpi)])


def variables(request, on, folder):
    mpi = {"MPIEXEC": request.getfixturevalue("mpiexec")} if on == "mpi" else {}
    return {**os.environ, "TMPDIR": str(folder), **mpi}


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
@on_both
def test_no_rank_and_no_directory_outlives_its_launcher(
    request, forked_python, tmp_path, has_ended, on
):
    cases, launchers = ENDS[on], []
    try:
        for number, (_, call, is_apart) in enumerate(cases):
            folder = tmp_path / str(number)
            folder.mkdir()
            words = call.format(f"wait, {str(folder)!r}, on={on!r}")
            launchers.append(
                subprocess.Popen(
                    [forked_python, "-c", SCRIPT % (is_apart, words)],
                    env=variables(request, on, folder),
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        for number, (order, call, _) in enumerate(cases):
            folder, launcher = tmp_path / str(number), launchers[number]
            wait_until(lambda folder=folder: len(list(folder.glob("pids-?"))) == 2, 90)
            launcher.send_signal(order)
            _, errors = launcher.communicate(timeout=30)
            files = folder.glob("pids-?")
            pids = [int(pid) for file in files for pid in file.read_text().split()]
            assert all(map(has_ended, pids)), "ranks or their children live"
            assert launcher.returncode == -order, errors
            if on == "cpu" or order == signal.SIGINT:
                wait_until(lambda folder=folder: not list(folder.glob("unisono-*")), 10)
            if order == signal.SIGINT or (order == signal.SIGTERM and call is RUN):
                assert len(list(folder.glob("finally-?"))) == 2
    finally:
        for launcher in launchers:
            launcher.kill()
            launcher.wait()


@pytest.fixture
def saving(request, forked_python, tmp_path):
    """Start a run of one of the functions above; wait until all of its ranks are up."""
    started = []

    def start(function, on="cpu", command=None, seconds=20):
        script = tmp_path / "saving.py"
        script.write_text(SAVING.replace("interrupt_s=20", f"interrupt_s={seconds}"))
        words = command or [forked_python, str(script), str(tmp_path), function, on]
        process = subprocess.Popen(
            words,
            cwd=tmp_path,
            env=variables(request, on, tmp_path),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        wait_until(lambda: len(list(tmp_path.glob("up-?"))) == 2, 90)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def pids_in(folder):
    return [int(path.read_text()) for path in folder.glob("up-?")]


@on_both
@pytest.mark.parametrize("function", ["asks", "catches"])
def test_the_first_ctrl_c_lets_ranks_save_and_end(saving, tmp_path, has_ended, function, on):
    launcher = saving(function, on)
    launcher.send_signal(signal.SIGINT)
    output, errors = launcher.communicate(timeout=60)
    assert len(list(tmp_path.glob("saved-?"))) == 2, errors
    assert launcher.returncode == -signal.SIGINT, errors
    assert "went on" not in output
    assert "the ranks have 20 s to save and end (Ctrl-C again kills them)" in errors
    assert "RankFailed" not in errors
    assert all(map(has_ended, pids_in(tmp_path)))
    assert list(tmp_path.glob("unisono-*")) == []


def test_a_rank_that_runs_may_save_while_another_one_starts(saving, tmp_path, has_ended):
    launcher = saving("late")
    launcher.send_signal(signal.SIGINT)
    _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == -signal.SIGINT, errors
    assert (tmp_path / "saved-0").exists(), errors
    assert not (tmp_path / "called-1").exists()
    assert all(map(has_ended, pids_in(tmp_path)))


@on_both
def test_the_second_ctrl_c_kills(saving, tmp_path, has_ended, on):
    launcher = saving("refuses", on)
    launcher.send_signal(signal.SIGINT)
    wait_until(lambda: len(list(tmp_path.glob("asked-?"))) == 2, 10)
    begin = time.monotonic()
    launcher.send_signal(signal.SIGINT)
    _, errors = launcher.communicate(timeout=30)
    assert time.monotonic() - begin < scaled_by_load(10), "that is the time for an orderly end"
    assert launcher.returncode == -signal.SIGINT, errors
    assert all(map(has_ended, pids_in(tmp_path)))
    assert list(tmp_path.glob("unisono-*")) == []


def test_what_goes_wrong_while_ranks_save_is_told_and_kept(saving, tmp_path):
    launcher = saving("breaks")
    launcher.send_signal(signal.SIGINT)
    _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == -signal.SIGINT, errors
    assert "raised OSError: rank " in errors
    assert errors.rstrip().endswith("KeyboardInterrupt")
    (kept,) = tmp_path.glob("unisono-*")
    assert "cannot save" in (kept / "rank-0.log").read_text()


def test_ctrl_c_on_the_command_line_lets_ranks_save_and_ends_with_code_130(
    saving, forked_python, tmp_path
):
    script = tmp_path / "script.py"
    script.write_text(SAVING.partition("platform =")[0] + "catches()\n")
    command = [forked_python, "-m", "unisono", "run", "--ranks", "2", str(script)]
    command += [str(tmp_path), "catches"]
    launcher = saving("", command=command)
    launcher.send_signal(signal.SIGINT)
    _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 130, errors
    assert len(list(tmp_path.glob("saved-?"))) == 2
    assert errors.rstrip().endswith("unisono: interrupted")
    assert "Traceback" not in errors


def test_a_hang_up_of_the_terminal_ends_a_launcher_as_an_exception_first(tmp_path):
    def launcher():
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
        with signals_of_launcher():
            try:
                os.kill(os.getpid(), signal.SIGHUP)
                time.sleep(60)
            finally:
                (tmp_path / "finally").touch()

    with pytest.raises(RankFailed) as caught:
        unisono.run(launcher, on="cpu", ranks=1, logs=QUIET)
    assert (caught.value.signal, (tmp_path / "finally").exists()) == ("SIGHUP", True)
