"""Runs that succeed: what ranks get, what comes back, what is left."""

from __future__ import annotations

import atexit
import linecache
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import unisono
from unisono.comm.backends import available, choose_backend
from unisono.cores import usable_cores
from unisono.errors import PlatformError

SCALE = 7
QUIET = unisono.Logs(console="none")
SHOW = Path(__file__).parents[2] / "examples" / "launch_everywhere.sh"


def sum_of_ranks(start: float, *, power: int = 1) -> dict[str, object]:
    comm = unisono.world()
    x = torch.full((2,), start + comm.rank**power)
    return {"rank": comm.rank, "sum": comm.all_reduce(x), "scaled": SCALE * comm.rank}


def test_values_come_back_in_rank_order_with_tensors_and_keywords(tmp_path):
    results = unisono.run(sum_of_ranks, 1.0, power=2, on="cpu", ranks=3)
    assert [value["rank"] for value in results] == [0, 1, 2]
    assert all(torch.equal(value["sum"], torch.full((2,), 8.0)) for value in results)
    assert results[2]["scaled"] == 14  # a global of a module that ranks cannot import
    assert (results.ranks, len(results.hosts), results.platform) == (3, 3, "cpu")
    assert results.start_s > 0 < results.wall_s
    assert results.dir is None
    assert list(tmp_path.iterdir()) == []


def test_a_closure_gets_its_place_threads_directory_and_arguments(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(sys, "argv", ["train.py", "--fast"])
    monkeypatch.setattr(sys, "path", [*sys.path, "/nowhere/in/particular"])
    monkeypatch.setenv("MY_SETTING", "kept")
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")  # of some other world: must not reach ours
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv("UNISONO_DETECT", "0")
    wanted = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MY_SETTING", "UNISONO_RESTART")

    def look():
        print("out", "of rank", unisono.world().rank)
        print("err", file=sys.stderr)
        os.write(1, b"from C\n")
        return {
            "env": [os.environ[name] for name in wanted],
            "threads": torch.get_num_threads(),
            "cwd": os.getcwd(),  # noqa: PTH109
            "argv": sys.argv,
            "last path": sys.path[-1],
            "backend": dist.get_backend(),
            "interface": os.environ["GLOO_SOCKET_IFNAME"],
            "group": os.getpgrp() == os.getpid(),
        }

    results = unisono.run(look, ranks=2)
    assert results[1] == {
        "env": ["1", "1", "2", "127.0.0.1", "kept", "0"],
        "threads": max(1, usable_cores() // 2),
        "cwd": str(tmp_path),
        "argv": ["train.py", "--fast"],
        "last path": "/nowhere/in/particular",
        "backend": choose_backend(None, device="cpu", nodes=1, available=available()),
        "interface": "lo",
        "group": True,
    }
    assert results.threads == results[0]["threads"]
    shown = capsys.readouterr()
    assert sorted(shown.out.splitlines()) == [
        "[0] from C",
        "[0] out of rank 0",
        "[1] from C",
        "[1] out of rank 1",
    ]
    assert sorted(shown.err.splitlines()) == ["[0] err", "[1] err"]
    assert sorted(results.log(1).splitlines()) == ["err", "from C", "out of rank 1"]


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 2000, reason="too few files")
def test_a_program_with_a_thousand_open_files_runs_ranks():
    with ExitStack() as files:
        for _ in range(1100):
            files.enter_context(Path(os.devnull).open())
        assert list(unisono.run(len, "ab", on="cpu", ranks=2, logs=QUIET)) == [2, 2]


def test_too_many_ranks_for_the_limit_of_open_files_are_refused_and_leave_none_open():
    def open_files():
        return sorted(int(fd.name) for fd in Path("/proc/self/fd").iterdir())

    unisono.run(len, "ab", on="cpu", ranks=2, logs=QUIET)  # the server is there
    before, limits = open_files(), resource.getrlimit(resource.RLIMIT_NOFILE)
    few = next(n for n in range(limits[0]) if n - sum(fd < n for fd in before) == 50)
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, limits[1]))
    try:
        with pytest.raises(PlatformError, match=f"may have {few} of them"):
            unisono.run(len, "ab", on="cpu", ranks=32, logs=QUIET)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(open_files()) == len(before)


def test_deadlines_may_be_longer_than_the_system_can_wait_at_once():
    platform = unisono.Platform(device="cpu", ranks=1, start_timeout_s=1e7, grace_s=1e7)
    assert list(unisono.run(len, "ab", on=platform, timeout_s=1e7, logs=QUIET)) == [2]


def test_one_rank_has_a_real_group_and_no_prefix(tmp_path, capsys):
    def alone():
        print("hello")
        dist.barrier()
        return unisono.world().size

    results = unisono.run(alone, on="cpu", ranks=1, logs=tmp_path / "logs", timeout_s=60)
    assert list(results) == [1]
    assert capsys.readouterr().out == "hello\n"
    assert results.dir is not None
    assert results.dir.parent == tmp_path / "logs"
    assert (results.dir / "rank-0.log").read_text() == "hello\n"
    assert results.dir.stat().st_mode & 0o777 == 0o700
    assert (results.dir / "rank-0.log").stat().st_mode & 0o777 == 0o600


def test_inline_is_this_very_process_and_its_exceptions_pass_unchanged():
    seen = []
    results = unisono.run(lambda: seen.append(os.getpid()) or unisono.world().size, on="inline")
    assert seen == [os.getpid()]
    assert (list(results), results.platform) == ([1], "inline")
    with pytest.raises(ZeroDivisionError):
        unisono.run(lambda: 1 / 0, on="inline")


def test_a_run_inside_a_rank_joins_its_world_instead_of_starting_another():
    def outer():
        inner = unisono.run(lambda: (unisono.world().rank, os.getpid()), ranks=2)
        return os.getpid(), list(inner), inner.ranks

    results = unisono.run(outer, ranks=2)
    pids = [value[0] for value in results]
    assert [value[1] for value in results] == [[(0, pids[0]), (1, pids[1])]] * 2


def test_a_failed_attempt_is_started_again_with_its_number(tmp_path, capsys):
    def fails_once():
        attempt = int(os.environ["UNISONO_RESTART"])
        if attempt == 0 and unisono.world().rank == 1:
            raise OSError("disk on fire")
        unisono.world().barrier()
        return attempt

    results = unisono.run(fails_once, ranks=2, max_restarts=1, logs=unisono.Logs(console="rank0"))
    said = capsys.readouterr().err
    assert "raised OSError: disk on fire; attempt 2 of 2 begins in 1 s\n" in said
    assert list(results) == [1, 1]
    assert results.restarts == 1
    assert list(tmp_path.iterdir()) == []


def test_a_thread_that_ends_by_itself_is_waited_for(tmp_path):
    def write_later():
        def write():
            time.sleep(0.3)
            (tmp_path / "written").touch()

        threading.Thread(target=write).start()

    unisono.run(write_later, on="cpu", ranks=1, logs=QUIET)
    assert (tmp_path / "written").exists()


def test_a_rank_may_start_a_world_of_its_own_and_more_ranks_than_cores_work():
    def outer():
        platform = unisono.Platform(device="cpu", ranks=2, detect=False)
        return list(unisono.run(lambda: unisono.world().size, on=platform, logs=QUIET))

    assert list(unisono.run(outer, on="cpu", ranks=1, logs=QUIET)) == [[2, 2]]
    many = 2 * usable_cores() + 1
    ones = unisono.run(lambda: sum(unisono.world().all_gather_object(1)), ranks=many, logs=QUIET)
    assert list(ones) == [many] * many


def test_a_rank_that_crashes_after_it_returned_is_a_warning_and_its_result_counts():
    def crashes_late():
        atexit.register(os.kill, os.getpid(), signal.SIGSEGV)
        return 5

    with pytest.warns(RuntimeWarning, match="rank 0 returned its result, then was killed by SIGSE"):
        assert list(unisono.run(crashes_late, on="cpu", ranks=1, logs=QUIET)) == [5]


def test_threads_at_work_are_a_warning_at_the_end_and_idle_ones_of_a_pool_are_not():
    def leaves_threads(is_busy):
        pool = ThreadPoolExecutor(thread_name_prefix="idle")
        total = sum(pool.map(abs, [1, -2]))
        linecache.pool = pool  # some module keeps it, as torch.compile does
        if is_busy:
            ThreadPoolExecutor(thread_name_prefix="busy").submit(time.sleep, 60)
        return total

    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert list(unisono.run(leaves_threads, False, on="cpu", ranks=1, logs=QUIET)) == [3]
    with pytest.warns(RuntimeWarning, match="left with threads still running: busy_0 "):
        assert list(unisono.run(leaves_threads, True, on="cpu", ranks=1, logs=QUIET)) == [3]


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
def test_one_script_under_every_starter_gives_the_same_result(forked_python, tmp_path):
    beside = str(Path(sys.executable).parent)
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith("SLURM_")},
        "PATH": f"{beside}{os.pathsep}{os.environ['PATH']}",
        "PYTHON": forked_python,  # each interpreter is a fork of the warm one
        "TMPDIR": str(tmp_path),
    }
    done = subprocess.run(
        ["sh", str(SHOW)], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stdout + done.stderr
    parts = re.split(r"^== (.*)$", done.stdout, flags=re.MULTILINE)[1:]
    shown = dict(zip(parts[::2], parts[1::2], strict=True))
    assert len(shown) >= 3
    for starter, output in shown.items():
        for rank in range(2):
            assert f"hello from rank {rank} of 2; all our ranks add up to 1" in output, starter
        assert "returned: [0, 1]" in output, starter
    if "mpi" in os.environ.get("UNISONO_REQUIRE", "").split(","):
        assert "mpiexec" in shown
