"""Runs that fail: one error, the right rank, in time, and nothing left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from tests.waiting import scaled_by_load

import unisono
from unisono.data_parallel import DataParallel
from unisono.errors import RankFailed, RankTimeout
from unisono.launch.pool import cleanup
from unisono.processes import process_start

AT_ONCE_S = 4.0  # two seconds are promised; a loaded machine may take longer
both_starts = pytest.mark.parametrize("spawn_method", ["auto", "spawn"])
sizes_of_starts = pytest.mark.parametrize(("spawn_method", "ranks"), [("auto", 2), ("spawn", 1)])
"""Where nobody has to wait, one fresh interpreter does."""
QUIET = unisono.Logs(console="none")


def fail(function, tmp_path, *, timeout_s=60.0, ranks=2, spawn_method="auto"):
    """Run `function(mark)`; return the error and the seconds since a rank wrote the mark."""
    platform = unisono.Platform(device="cpu", ranks=ranks, spawn_method=spawn_method)
    mark = tmp_path / "mark"
    with pytest.raises((RankFailed, RankTimeout)) as caught:
        unisono.run(
            function,
            mark,
            on=platform,
            timeout_s=timeout_s,
            logs=unisono.Logs(console="none"),
        )
    since = time.time() - mark.stat().st_mtime if mark.exists() else 0.0
    return caught.value, since


def test_a_child_that_ends_during_the_report_does_not_take_its_place(tmp_path):
    def step(mark):
        def complain(*_):
            raise RuntimeError("a worker has ended")  # as torch's DataLoader does

        class OwnError(Exception):
            def __str__(self):
                return f"told, {subprocess.run(['true'], check=False).returncode}"

        signal.signal(signal.SIGCHLD, complain)
        raise OwnError

    error, _ = fail(step, tmp_path, ranks=1)
    assert "OwnError: told, 0" in str(error).splitlines()[0]


@both_starts
def test_a_rank_that_raises_ends_the_one_that_waits_in_a_collective(tmp_path, spawn_method):
    def step(mark):
        comm = unisono.world()
        if comm.rank == 1:
            mark.touch()
            print(1 // (comm.rank - 1))
        comm.barrier()

    error, seconds = fail(step, tmp_path, spawn_method=spawn_method)
    assert seconds < scaled_by_load(AT_ONCE_S)
    assert isinstance(error, RankFailed)
    assert (error.rank, error.exit_code, error.signal) == (1, None, None)
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert "print(1 // (comm.rank - 1))" in str(error)
    assert "pool/rank.py" not in str(error)
    assert str(error).startswith("rank 1 of 2 on ")
    assert "raised ZeroDivisionError" in str(error).splitlines()[0]
    assert "test_failures.py" in error.waiting[0]
    assert "in step" in error.waiting[0]
    assert str(error).splitlines()[-1].startswith("HINT: ")
    assert error.job_dir is not None
    assert "ZeroDivisionError" in Path(error.job_dir, "rank-1.log").read_text()


def test_a_rank_that_dies_without_a_word_leaves_its_last_lines_in_the_error(tmp_path):
    def die(mark):
        if unisono.world().rank == 1:
            print("last words", flush=True)
            mark.touch()
            os._exit(7)
        time.sleep(60)

    error, seconds = fail(die, tmp_path, spawn_method="spawn")
    assert seconds < scaled_by_load(AT_ONCE_S)
    assert isinstance(error, RankFailed)
    assert (error.rank, error.exit_code, error.signal) == (1, 7, None)
    assert "last words" in str(error)
    assert "in die" in error.waiting[0]


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_the_death_of_rank_0_which_keeps_the_store_names_rank_0(backend):
    def train():
        model = DataParallel(torch.nn.Linear(2, 1))
        for step in range(100):
            if step == 3 and unisono.world().rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            model(torch.ones(4, 2)).sum().backward()

    on = unisono.Platform(device="cpu", ranks=3, backend=backend)
    with pytest.raises(RankFailed, match=r"rank 0 of 3 on .* was killed by SIGKILL") as caught:
        unisono.run(train, on=on)
    assert (caught.value.rank, caught.value.signal) == (0, "SIGKILL")


@pytest.mark.parametrize("code", [0, 3])
def test_leaving_before_returning_is_a_failure_even_with_code_0(tmp_path, code):
    def leave(_mark):
        unisono.world().barrier()
        sys.exit(code)

    error, _ = fail(leave, tmp_path, ranks=1)
    assert isinstance(error, RankFailed)
    assert error.exit_code == code
    assert "exited before returning" in str(error)


def test_a_keyboard_interrupt_in_a_rank_is_its_failure_and_not_the_callers(tmp_path):
    def interrupted(_mark):
        if unisono.world().rank == 1:
            raise KeyboardInterrupt
        unisono.world().barrier()

    error, _ = fail(interrupted, tmp_path)
    assert isinstance(error, RankFailed)
    assert error.rank == 1
    assert "raised KeyboardInterrupt" in str(error).splitlines()[0]


def test_finally_blocks_of_stopped_ranks_run(tmp_path):
    cleaned = tmp_path / "cleaned"

    def tidy(_mark):
        if unisono.world().rank == 1:
            raise RuntimeError("stop here")
        try:
            time.sleep(60)
        finally:
            cleaned.touch()

    fail(tidy, tmp_path)
    assert cleaned.exists()


def test_the_one_of_four_that_skips_a_collective_is_named_at_the_deadline(tmp_path):
    def skip_one(_mark):
        comm = unisono.world()
        comm.barrier()
        if comm.rank == 2:
            time.sleep(600)
        comm.all_reduce(torch.ones(2))

    error, _ = fail(skip_one, tmp_path, timeout_s=2.0, ranks=4)
    assert isinstance(error, RankTimeout)
    assert error.rank == 2
    assert sorted(error.stacks) == [0, 1, 2, 3]
    assert "barrier" in error.last_collective[2]
    assert all("all_reduce" in error.last_collective[rank] for rank in (0, 1, 3))
    assert "Latest collective of ranks 0-1, 3: all_reduce" in str(error)


def test_a_call_that_holds_the_interpreter_lock_is_ended_at_the_deadline_and_shown(tmp_path):
    def stuck(mark):
        import ctypes

        if unisono.world().rank == 1:
            mark.write_text(str(os.getpid()))
            ctypes.PyDLL(None).sleep(600)  # no Python code of this process runs any more
        unisono.world().barrier()

    error, _ = fail(stuck, tmp_path, timeout_s=1.0)
    assert isinstance(error, RankTimeout)
    assert sorted(error.stacks) == [0, 1]
    assert "in stuck" in error.stacks[1]
    assert error.rank == 1


def test_a_call_that_holds_the_interpreter_lock_does_not_hold_up_anothers_error(tmp_path):
    def stuck(mark):
        import ctypes

        if unisono.world().rank == 1:
            time.sleep(0.3)
            mark.touch()
            raise ValueError("no such file")
        ctypes.PyDLL(None).sleep(600)

    error, seconds = fail(stuck, tmp_path)
    assert seconds < scaled_by_load(AT_ONCE_S)
    assert isinstance(error, RankFailed)
    assert (error.rank, type(error.__cause__)) == (1, ValueError)
    assert "in stuck" in error.waiting[0]


def stop_here(path):
    if os.environ["RANK"] == "1":
        path.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)


class StopsWhereItArrives:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return stop_here, (self.path,)


def look_at(_value):
    pass


def test_a_rank_that_is_stopped_while_it_starts_is_named_at_the_deadline(tmp_path, has_ended):
    unisono.run(look_at, 0, on="cpu", ranks=1)  # so that the server is warm
    platform = unisono.Platform(device="cpu", ranks=2, start_timeout_s=3.0)
    stops = StopsWhereItArrives(tmp_path / "pid")
    with pytest.raises(RankTimeout, match="rank 1 of 2 not ready 3 s after the start") as caught:
        unisono.run(look_at, stops, on=platform, logs=unisono.Logs(console="none"))
    assert caught.value.rank == 1
    assert has_ended(int((tmp_path / "pid").read_text()))


@sizes_of_starts
def test_processes_that_a_rank_started_end_with_it(tmp_path, has_ended, spawn_method, ranks):
    def start_children(mark):
        import subprocess

        if unisono.world().rank == 0:
            children = [
                subprocess.Popen(["sleep", "600"], start_new_session=is_apart)
                for is_apart in (False, True)
            ]
            mark.write_text(" ".join(str(child.pid) for child in children))
        unisono.world().barrier()
        raise RuntimeError("and leave them")

    fail(start_children, tmp_path, spawn_method=spawn_method, ranks=ranks)
    assert all(has_ended(int(pid)) for pid in (tmp_path / "mark").read_text().split())


def deny(words):
    raise ConnectionError(words)


@pytest.mark.parametrize(
    "own",
    [
        lambda: deny("the database is gone"),
        lambda: exec("import unisono; raise unisono.errors.RankFailed('a world of my own')"),
    ],
    ids=["ConnectionError", "RankFailed"],
)
def test_what_the_users_code_raises_is_an_error_of_its_own_rank(tmp_path, own):
    def work(mark):
        if unisono.world().rank == 1:
            mark.touch()
            own()
        while not mark.exists():
            time.sleep(0.01)
        time.sleep(0.15)
        raise ValueError("later")

    error, _ = fail(work, tmp_path)
    assert isinstance(error, RankFailed)
    assert error.rank == 1


def test_a_lost_connection_inside_torch_is_a_consequence(tmp_path):
    def work(mark):
        import torch.distributed as dist

        if unisono.world().rank == 1:
            mark.touch()
            time.sleep(0.15)
            raise ValueError("the cause")
        where = "tcp://127.0.0.1:1?rank=1&world_size=2"
        next(iter(dist.rendezvous(where, timeout=timedelta(seconds=0.05))))

    error, _ = fail(work, tmp_path)
    assert error.rank == 1
    assert isinstance(error.__cause__, ValueError)


def test_what_failed_runs_leave_expires_and_nothing_else_does(tmp_path, monkeypatch):
    def failed_run():
        with pytest.raises(RankFailed) as caught:
            unisono.run(divmod, 1, 0, ranks=1, logs=unisono.Logs(console="none"))
        return Path(str(caught.value.job_dir))

    def made(name, *, mark=cleanup.KEPT, days=0.0, mode=0o700):
        path = tmp_path / name
        path.mkdir(mode=mode)
        path.chmod(mode)
        if mark:
            (path / cleanup.MARK).touch(mode=0o600)
            (path / cleanup.MARK).write_text(mark)
            os.utime(path / cleanup.MARK, (time.time() - days * 86400,) * 2)
        return path

    first = failed_run()
    assert "ZeroDivisionError" in (first / "rank-0.log").read_text()
    of_others = [
        made("unisono-mine", mark="", days=30),  # a directory of the user's own
        made("unisono-open", days=30, mode=0o755),
        made("other", days=30),
        made(
            "unisono-live",
            mark=f"{os.getpid()} {process_start(os.getpid())} {socket.gethostname()}",
            days=30,
        ),
    ]
    (tmp_path / "unisono-link").symlink_to(tmp_path / "other")
    old = made("unisono-old", days=8)
    young = made("unisono-young", days=6)
    second = failed_run()
    assert not old.exists()
    assert all(path.is_dir() for path in (first, second, young, *of_others))
    monkeypatch.setattr(cleanup, "KEEP_COUNT", 2)
    third = failed_run()  # clears before it leaves its own
    assert [path.exists() for path in (young, first, second, third)] == [False, True, True, True]


@pytest.mark.usefixtures("real_interpreters")
def test_a_crash_shows_where_the_python_code_stood(tmp_path):
    def crash(_mark):
        import ctypes

        if unisono.world().rank == 1:
            ctypes.string_at(0)
        time.sleep(60)

    error, _ = fail(crash, tmp_path, spawn_method="spawn")
    assert isinstance(error, RankFailed)
    assert (error.rank, error.signal) == (1, "SIGSEGV")
    assert "It stood at:" in str(error)
    assert "test_failures.py" in str(error.traceback)
    assert "in crash" in str(error.traceback)
    assert "in string_at" in str(error)
    assert "pool/rank.py" not in str(error)


@pytest.mark.parametrize("after", ["barrier", "all_reduce"])
def test_ranks_with_different_numbers_of_batches_are_named_with_their_lines(tmp_path, after):
    def train(_mark):
        comm = unisono.world()
        for _ in range(3 + comm.rank):
            comm.all_reduce(torch.ones(10))  # a step
        if after == "barrier":
            comm.barrier()
        else:
            comm.all_reduce(torch.ones(3))

    error, _ = fail(train, tmp_path)
    first = train.__code__.co_firstlineno
    later = first + (5 if after == "barrier" else 7)
    lines = str(error).splitlines()
    assert f"  rank 0: test_failures.py:{later} in train" in lines
    assert f"  rank 1: test_failures.py:{first + 3} in train" in lines
    assert "HINT: different numbers of batches?" in lines[-1]


def test_a_deadline_holds_in_a_world_that_exists_already():
    def outer():
        try:
            unisono.run(time.sleep, 600, timeout_s=0.5)
        except RankTimeout as error:
            return sorted(error.stacks), str(error).splitlines()[0], error.rank

    def fine():
        return list(unisono.run(lambda: unisono.world().rank, timeout_s=60))

    found = unisono.run(outer, on="cpu", ranks=2, logs=QUIET, timeout_s=60)
    for rank, (stacks, headline, culprit) in enumerate(found):
        assert rank in stacks
        assert headline == f"rank {rank} of 2 not done within timeout_s=0.5"
        assert culprit == rank
    assert list(unisono.run(fine, on="cpu", ranks=2, logs=QUIET)) == [[0, 1], [0, 1]]
