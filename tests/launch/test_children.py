"""Processes that a rank starts are plain processes: no rank, and not deaf to signals."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing import shared_memory
from pathlib import Path

import pytest

import unisono
from unisono.environment import RANK_PID, detect, rank_mark
from unisono.errors import RankFailed

QUIET = unisono.Logs(console="none")


def sleep():
    time.sleep(600)


def square(x):
    return x * x


def test_a_forked_child_of_a_rank_ends_at_a_signal_and_a_pool_ends():
    def work():
        context = multiprocessing.get_context("fork")
        codes = []
        for number in (signal.SIGTERM, signal.SIGUSR2):
            child = context.Process(target=sleep)
            child.start()
            os.kill(child.pid, number)
            child.join(10)
            codes.append(child.exitcode)
            child.kill()
        for _ in range(4):
            with context.Pool(2) as pool:
                squares = pool.map(square, range(4))
        return codes, squares

    for codes, squares in unisono.run(work, on="cpu", ranks=2, timeout_s=60, logs=QUIET):
        assert codes == [-signal.SIGTERM, -signal.SIGUSR2]
        assert squares == [0, 1, 4, 9]


def test_a_forked_child_keeps_the_handler_of_the_user_and_no_pipe_to_the_launcher():
    def work():
        from unisono.launch.context import here

        me = here()
        assert me is not None
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            is_ignored = signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
            target = Path(f"/proc/self/fd/{me.report_fd}").readlink()
            os.write(write, f"{is_ignored} {target}".encode())
            os._exit(0)
        os.waitpid(pid, 0)
        return os.read(read, 1000).decode()

    assert list(unisono.run(work, ranks=1, logs=QUIET)) == ["True /dev/null"]


def test_a_forked_child_that_comes_out_of_the_function_is_not_taken_for_the_rank(tmp_path):
    def work():
        comm = unisono.world()
        for number in range(3 * (comm.rank == 0)):
            if os.fork() == 0:
                while not (tmp_path / "has-returned").exists():
                    time.sleep(0.01)
                if number == 1:
                    raise ValueError("in a child")
                if number == 2:
                    sys.exit(3)
                return "child"
        if comm.rank == 0:
            return "parent"
        (tmp_path / "has-returned").touch()
        return "other", time.sleep(0.5)

    results = unisono.run(work, on="cpu", ranks=2, timeout_s=60, logs=QUIET)
    assert list(results) == ["parent", ("other", None)]
    assert results.log(0).splitlines()[-1] == "ValueError: in a child"


@pytest.mark.usefixtures("real_interpreters")
@pytest.mark.parametrize(("spawn_method", "end"), [("spawn", "returns"), ("auto", "is killed")])
def test_shared_memory_that_a_rank_does_not_remove_is_removed_behind_it(
    spawn_method, end, tmp_path
):
    def work():
        memory = shared_memory.SharedMemory(create=True, size=1000)
        (tmp_path / str(unisono.world().rank)).write_text(memory.name)
        multiprocessing.get_context("fork").Process(target=sleep, daemon=True).start()
        if end == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)

    platform = unisono.Platform(device="cpu", ranks=2, spawn_method=spawn_method)
    with suppress(RankFailed):
        unisono.run(work, on=platform, timeout_s=60, logs=QUIET)
    for path in tmp_path.glob("[01]"):
        assert not Path("/dev/shm", path.read_text()).exists()


PROGRAM = "import unisono; print(unisono.world().rank, unisono.world().size)"


def tell(queue):
    queue.put((unisono.world().rank, unisono.world().size))


def test_a_child_of_a_rank_is_a_world_of_one(forked_python):
    def work():
        told = []
        multiprocessing.set_executable(forked_python)
        for method in ("spawn", "forkserver"):
            context = multiprocessing.get_context(method)
            queue = context.Queue()
            child = context.Process(target=tell, args=(queue,))
            child.start()
            told.append(queue.get(timeout=60))
            child.join(10)
        words = subprocess.run(
            [forked_python, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True
        ).stdout.split()
        return {*told, tuple(map(int, words))}, unisono.world().size

    for told, size in unisono.run(work, ranks=2, timeout_s=120, logs=QUIET):
        assert told == {(0, 1)}
        assert size == 2


def test_a_child_of_a_script_that_has_not_joined_its_world_does_not_join_it(
    forked_python, tmp_path
):
    script = tmp_path / "script.py"
    script.write_text(
        "import subprocess, sys, os, unisono\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        f"    {PROGRAM}; sys.stdout.flush()\n"
        "    os._exit(0)\n"
        "os.waitpid(pid, 0)\n"
        f"subprocess.run([sys.executable, '-c', {PROGRAM!r}], check=True)\n"
        "assert unisono.world().size == 2\n"
    )
    command = [forked_python, "-m", "unisono", "run", "--ranks", "2", "--timeout-s", "60"]
    done = subprocess.run(
        [*command, str(script)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] 0 1"] * 2 + ["[1] 0 1"] * 2


def test_the_mark_of_a_rank_counts_for_its_children_and_not_for_those_of_other_launchers():
    rank = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "4000",
        "UNISONO_RUN_ID": "3f2a",
    }
    mine = {**rank, RANK_PID: rank_mark(rank, os.getpid())}
    assert (detect(mine).kind, detect(mine).rank) == ("unisono", 1)
    child = {**rank, RANK_PID: rank_mark(rank, os.getppid())}
    assert (detect(child).kind, detect(child).size) == ("bare", 1)
    under_torchrun = {**child, "TORCHELASTIC_RUN_ID": "none", "RANK": "0", "MASTER_PORT": "4001"}
    assert (detect(under_torchrun).kind, detect(under_torchrun).rank) == ("torchrun", 0)
    mpi = {name: text for name, text in child.items() if not name.startswith(("MASTER", "RANK"))}
    assert detect({**mpi, "PMI_RANK": "2", "PMI_SIZE": "3"}).rank == 2
