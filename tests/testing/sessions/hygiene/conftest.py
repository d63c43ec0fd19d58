"""Ways to leave something behind, undone when the test is over and everything was looked at."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import pytest

SEGMENT = Path("/dev/shm", f"{os.environ['BENCH_UNDER_TEST'][:8]}-{os.getpid()}-leaked")
"""With the number of its maker, so that sessions beside this one leave it alone."""
DIRECTORY = Path(tempfile.gettempdir(), "unisono-leaked")
KEPT = []


def leak_variable():
    os.environ["LEAKED"] = "1"


def leak_thread():
    threading.Thread(target=time.sleep, args=(60,), daemon=True, name="leaked-thread").start()


def leak_process():
    KEPT.append(subprocess.Popen(["sleep", "60"]))


def leak_file():
    KEPT.append(os.open("leaked-file", os.O_CREAT | os.O_RDWR))


def leak_shared_memory():
    SEGMENT.touch()


def leak_temporary():
    DIRECTORY.mkdir()


def leak_nothing():
    os.environ["MINE"] = "1"
    del os.environ["MINE"]
    with tempfile.TemporaryFile():
        subprocess.run(["true"], check=True)
    threading.Thread(target=time.sleep, args=(0.01,)).start()


LEAKS = {
    "variable": leak_variable,
    "thread": leak_thread,
    "process": leak_process,
    "file": leak_file,
    "shared_memory": leak_shared_memory,
    "temporary": leak_temporary,
    "nothing": leak_nothing,
}


def leak_one(what):
    LEAKS[what]()


@pytest.fixture
def leak():
    return leak_one


def pytest_runtest_logfinish():
    os.environ.pop("LEAKED", None)
    for thing in KEPT:
        if isinstance(thing, int):
            os.close(thing)
        else:
            thing.kill()
            thing.wait()
    KEPT.clear()
    with contextlib.suppress(FileNotFoundError):
        SEGMENT.unlink()
    with contextlib.suppress(FileNotFoundError):
        DIRECTORY.rmdir()
