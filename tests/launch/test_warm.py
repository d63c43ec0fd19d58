"""Ranks from the warm server: quick, and nothing in them is of yesterday."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch

import unisono
from unisono import accelerator
from unisono.errors import RankFailed
from unisono.launch.pool import client
from unisono.testing.leaks import Holdings

QUIET = unisono.Logs(console="none")


def parents(count=1):
    """Return the parents of the ranks of a run: the warm server, or this process."""
    return set(unisono.run(os.getppid, on="cpu", ranks=count, logs=QUIET))


def test_one_server_forks_all_ranks_until_it_is_idle_killed_or_shut_down(monkeypatch, has_ended):
    (first,) = parents(2)
    assert first == client.get_server().pid != os.getpid()
    assert parents() == {first}
    os.kill(first, signal.SIGKILL)
    monkeypatch.setenv("UNISONO_SERVER_IDLE_S", "0.2")
    (second,) = parents()
    assert second != first
    assert has_ended(second)  # by itself
    assert str(second) not in str(Holdings.now(["processes"]).entries)  # and is no one's zombie
    monkeypatch.undo()
    (third,) = parents()
    assert third != second
    unisono.launch.shutdown()
    assert has_ended(third)


def test_a_rank_told_to_stop_in_its_first_moments_does_not_take_the_server_along(tmp_path):
    (first,) = parents()
    for _ in range(30):
        with tempfile.TemporaryFile() as payload:
            variables = {"UNISONO_RUN_ID": "none", "RANK": "0"}
            (rank,) = client.fork_ranks(
                [variables], payload_fd=payload.fileno(), job_dir=tmp_path, stdin_rank=None
            )
            rank.signal(signal.SIGTERM)
            rank.collect()
            rank.close()
    assert parents() == {first}


def shapes_of_equal_size():
    comm = unisono.world()
    comm.all_reduce(torch.ones(2, 3) if comm.rank else torch.ones(3, 2))


def test_check_mode_is_asked_for_by_the_run_and_not_by_the_start_of_the_server(monkeypatch):
    unisono.run(shapes_of_equal_size, on="cpu", ranks=2, logs=QUIET)  # only bytes are compared
    monkeypatch.setenv("UNISONO_CHECK", "1")
    with pytest.raises(RankFailed, match="different shapes"):
        unisono.run(shapes_of_equal_size, on="cpu", ranks=2, logs=QUIET)
    monkeypatch.setenv("UNISONO_CHECK", "0")
    unisono.run(shapes_of_equal_size, on="cpu", ranks=2, logs=QUIET)


@pytest.mark.parametrize("reason", ["asked for", "CUDA here", "threads in the server"])
def test_a_fresh_interpreter_is_taken_where_a_fork_would_be_unsound(reason, monkeypatch):
    platform = unisono.Platform(device="cpu", ranks=1)
    if reason == "asked for":
        platform = platform.but(spawn_method="spawn")
    elif reason == "CUDA here":
        monkeypatch.setattr(accelerator, "initialised", lambda: "cuda")
    else:
        # A module that starts a thread while the server loads makes every fork unsound.
        monkeypatch.setattr(
            client,
            "_SERVER_BOOTSTRAP",
            "import threading, time; threading.Thread(target="
            "time.sleep, args=(600,), daemon=True).start(); " + client._SERVER_BOOTSTRAP,
        )
        unisono.launch.shutdown()
    assert list(unisono.run(os.getppid, on=platform, logs=QUIET)) == [os.getpid()]
    if reason == "threads in the server":
        unisono.launch.shutdown()  # that server is of no use to others


def test_no_two_ranks_and_no_two_runs_draw_the_same_numbers():
    def draw():
        import random

        import numpy as np

        return random.random(), np.random.rand(), torch.rand(1).item()

    drawn = [v for _ in range(2) for v in unisono.run(draw, on="cpu", ranks=2, logs=QUIET)]
    for kind in zip(*drawn, strict=True):
        assert len(set(kind)) == 4, drawn


def test_changes_between_two_runs_are_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "changing.py").write_text("VALUE = 1\n")

    def look():
        import changing  # pyright: ignore[reportMissingImports]

        warnings.warn("late", FutureWarning, stacklevel=1)
        mode = os.umask(0)
        return changing.VALUE, os.environ.get("MY_WORD"), str(Path.cwd()), sys.argv[-1], mode

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        monkeypatch.syspath_prepend(tmp_path)
        before = unisono.run(look, on="cpu", ranks=1, logs=QUIET)[0]
        assert before[:2] == (1, None)
        (tmp_path / "changing.py").write_text("VALUE = 22\n")
        monkeypatch.setenv("MY_WORD", "new")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["x", "last"])
        mask = os.umask(0o027)
        try:
            after = unisono.run(look, on="cpu", ranks=1, logs=QUIET)[0]
        finally:
            os.umask(mask)
        assert after == (22, "new", str(tmp_path), "last", 0o027)
        warnings.simplefilter("error", FutureWarning)
        with pytest.raises(unisono.errors.RankFailed, match="FutureWarning"):
            unisono.run(look, on="cpu", ranks=1, logs=QUIET)


def test_launches_at_the_same_time_all_succeed():
    def sum_up(start):
        comm = unisono.world()
        return comm.all_reduce(torch.tensor([start + comm.rank])).item()

    totals = {}

    def launch(start):
        totals[start] = list(unisono.run(sum_up, start, on="cpu", ranks=2, logs=QUIET))

    threads = [threading.Thread(target=launch, args=(start,)) for start in range(0, 80, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert totals == {start: [2 * start + 1] * 2 for start in range(0, 80, 10)}


def memory_mb():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_sixty_four_ranks_start_meet_and_end_as_few_do():
    def meet():
        begin = time.monotonic()
        total = unisono.world().all_reduce(torch.ones(1))
        first_s = time.monotonic() - begin
        status = Path("/proc/self/status").read_text()
        shared_kb = int(status.partition("RssShmem:")[2].split()[0])
        has_mpi = "libmpi" in Path("/proc/self/maps").read_text()
        return int(total), first_s, shared_kb, has_mpi

    results = unisono.run(meet, on="cpu", ranks=64, timeout_s=100)
    totals, firsts, shared_kb, have_mpi = zip(*results, strict=True)
    assert set(totals) == {64}
    assert max(firsts) < 4.5  # a name server that does not answer costs 5 s
    assert max(shared_kb) < 16 << 10  # the slots of all of them are 128 MB
    assert not any(have_mpi)  # nobody has asked for it


def test_many_runs_leave_no_descriptor_no_memory_and_no_child_behind():
    def small_sum():
        return unisono.world().all_reduce(torch.ones(10)).sum().item()

    for _ in range(3):
        unisono.run(small_sum, on="cpu", ranks=2, logs=QUIET)
    open_before, memory_before = len(list(Path("/proc/self/fd").iterdir())), memory_mb()
    shared_before = sorted(Path("/dev/shm").iterdir())
    for number in range(10):
        ranks = 1 if number % 5 else 2
        sums = list(unisono.run(small_sum, on="cpu", ranks=ranks, logs=QUIET))
        assert sums == [10.0 * ranks] * ranks
    assert len(list(Path("/proc/self/fd").iterdir())) == open_before
    assert [p for p in Path("/dev/shm").glob("unisono*") if p not in shared_before] == []
    assert memory_mb() - memory_before < 15
    pid = client.get_server().pid
    end = time.monotonic() + 5
    while children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        assert time.monotonic() < end, children
        time.sleep(0.02)


def has_loaded(name):
    """Return whether this rank came up with a module loaded."""
    return name in sys.modules


def test_what_optimizers_need_is_loaded_once_the_server_is_idle():
    unisono.launch.shutdown()
    assert list(unisono.run(has_loaded, "torch._dynamo", on="cpu", ranks=1, logs=QUIET)) == [False]
    deadline = time.monotonic() + 60
    while not unisono.run(has_loaded, "torch._dynamo", on="cpu", ranks=1, logs=QUIET)[0]:
        assert time.monotonic() < deadline
        time.sleep(1.5)


def faults_of_a_step() -> float:
    import resource

    import torch

    def step() -> None:
        [torch.zeros(3_000_000) for _ in range(4)]  # freed together

    for _ in range(5):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        step()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 20


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_a_rank_keeps_what_it_frees_unless_the_user_says_otherwise(monkeypatch):
    assert max(unisono.run(faults_of_a_step, ranks=2)) < 200  # of about 12,000 pages
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert min(unisono.run(faults_of_a_step, ranks=2)) > 200
