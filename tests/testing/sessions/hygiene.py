"""Tests that leave things behind, and tests that do not."""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import pytest

KEPT = []


def leak_variable():
    os.environ["LEAKED"] = "1"


def leak_thread():
    threading.Thread(target=time.sleep, args=(60,), daemon=True, name="leaked-thread").start()


def leak_process():
    KEPT.append(subprocess.Popen(["sleep", "60"]))


def leak_file():
    KEPT.append(Path("leaked-file").open("w"))


def leak_shared_memory():
    Path("/dev/shm", f"{os.environ['BENCH_UNDER_TEST'][:8]}-leaked").touch()


def leak_temporary():
    Path(tempfile.gettempdir(), "unisono-leaked").mkdir()


def leak_nothing():
    os.environ["MINE"] = "1"
    del os.environ["MINE"]
    with tempfile.TemporaryFile():
        subprocess.run(["true"], check=True)
    thread = threading.Thread(target=time.sleep, args=(0.01,))
    thread.start()


IN_A_PROCESS = [leak_variable, leak_thread, leak_process, leak_file, leak_nothing]
ON_THE_HOST = [leak_shared_memory, leak_temporary]


@pytest.fixture(autouse=True)
def remove_what_was_left():
    """Last to end, because first to start: undo the leaks after they were found."""
    environ = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(environ)
    for thing in KEPT:
        thing.kill() if isinstance(thing, subprocess.Popen) else thing.close()
        if isinstance(thing, subprocess.Popen):
            thing.wait()
    KEPT.clear()
    Path("/dev/shm", f"{os.environ['BENCH_UNDER_TEST'][:8]}-leaked").unlink(missing_ok=True)
    if Path(tempfile.gettempdir(), "unisono-leaked").exists():
        Path(tempfile.gettempdir(), "unisono-leaked").rmdir()


@pytest.mark.parametrize("leak", IN_A_PROCESS + ON_THE_HOST, ids=lambda f: f.__name__)
def test_plain(leak):
    leak()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("leak", IN_A_PROCESS, ids=lambda f: f.__name__)
def test_one_rank(leak):
    import torch.distributed as dist

    if dist.get_rank() == 1:
        leak()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("leak", ON_THE_HOST, ids=lambda f: f.__name__)
def test_host(leak):
    import torch.distributed as dist

    if dist.get_rank() == 1:
        leak()


@pytest.mark.ranks(2)
def test_setting():
    import torch

    torch.set_default_dtype(torch.float64)


@pytest.mark.ranks(2)
def test_group_of_a_rank_is_not_a_leak():
    import torch.distributed as dist

    dist.new_group([0, 1])


def test_group(tmp_path):
    import torch.distributed as dist

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)


def test_after_the_group():
    import torch.distributed as dist

    dist.destroy_process_group()


@pytest.mark.leaks("environment")
def test_allowed():
    leak_variable()


@pytest.mark.ranks(2)
@pytest.mark.leaks("environment")
def test_allowed_on_ranks():
    leak_variable()


@pytest.mark.leaks("environment")
def test_other_kinds_are_still_found():
    leak_thread()


def test_failure_is_told_once():
    leak_variable()
    raise ValueError("first")
