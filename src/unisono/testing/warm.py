"""The warm process: it has torch imported and forks a rank whenever the pool asks for one.

Why an own server and not `multiprocessing`'s forkserver: that one is a singleton with one preload
list for the whole program, so using it would change the state of the user's own tests. This one is
private to a pool, reaps its ranks (so that exit codes are exact), and is the one who cleans up when
the test process is killed: its control socket closes, it kills all ranks and removes the directory.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection

PRELOAD = (
    "cloudpickle",
    "numpy",
    "torch",
    "torch.distributed",
    "torch.distributed.device_mesh",
    "torch._dynamo",  # what the first optimizer of a process imports, for seconds
    "pytest",
    "unisono.comm",
)
"""Imported once, before the first fork; one that cannot be imported is left out."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_GROUP_EXIT_S = 0.5


def serve(control_fd: int, directory: str, parent_pid: int) -> None:
    """Preload, say so, then answer `fork N RANK` (with the rank's socket) and `reap N PID KILL`.

    An answer repeats the number N of its request.

    Args:
        control_fd: stream socket to the pool; when it closes, everything ends.
        directory: the pool's private directory, removed at the end.
        parent_pid: process that must be alive; when it dies this one cleans up.
    """
    control = socket.socket(fileno=control_fd)
    ranks: set[int] = set()
    keep = False
    # A handler that raised could do so in the middle of the cleaning up; this one ends the wait.
    signal.signal(signal.SIGTERM, lambda *_: control.shutdown(socket.SHUT_RDWR))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        if os.getppid() != parent_pid:
            return
        preload()
        importlib.import_module("unisono.testing.rank_main")
        with contextlib.suppress(OSError):  # the pool is gone
            control.sendall(b"0 0\n")
            _answer(control, directory, ranks)
    except Exception:
        keep = True
        traceback.print_exc()  # into a file of the directory, for the pool to read
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        control.close()
        for pid in ranks:
            _reap(pid, kill=True)
        if not keep:
            shutil.rmtree(directory, ignore_errors=True)


def preload() -> None:
    """Import `PRELOAD` with one thread, then freeze the heap so that forks share it."""
    with _environment(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1"):
        for name in PRELOAD:
            # Whatever is wrong with a module shall show in the test that uses it, not here.
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.set_num_threads(1)
    gc.collect()
    gc.freeze()


def _answer(control: socket.socket, directory: str, ranks: set[int]) -> None:
    while True:
        message, fds, _, _ = socket.recv_fds(control, 1024, 1)
        if not message:
            return
        verb, serial, number, *rest = message.split()
        if verb == b"fork":
            answer = _fork_rank(control, int(number), fds[0], directory)
            ranks.add(answer)
        else:
            answer = _reap(int(number), kill=rest == [b"1"])
            ranks.discard(int(number))
        control.sendall(b"%s %d\n" % (serial, answer))


def _fork_rank(control: socket.socket, rank: int, fd: int, directory: str) -> int:
    server = os.getpid()
    pid = os.fork()
    if pid:
        os.close(fd)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        control.close()
        if os.getppid() == server:
            from unisono.testing.rank_main import rank_main

            rank_main(Connection(fd), rank, directory)
            code = 0
    finally:
        os._exit(code)


def _reap(pid: int, *, kill: bool) -> int:
    """End rank `pid` and what it started; return its exit code, or minus the signal's number."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    deadline = time.monotonic() + (0.0 if kill else 1.0)
    while not ended and time.monotonic() < deadline:
        time.sleep(0.002)
        ended, status = os.waitpid(pid, os.WNOHANG)
    if not ended:
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    # Some helpers (resource trackers) unlink shared memory when their rank is gone: let them.
    deadline = time.monotonic() + _GROUP_EXIT_S
    with contextlib.suppress(ProcessLookupError, PermissionError):
        while time.monotonic() < deadline:
            _collect_group(pid)
            os.killpg(pid, 0)
            time.sleep(0.005)
        os.killpg(pid, signal.SIGKILL)
        time.sleep(0.01)
        _collect_group(pid)
    return os.waitstatus_to_exitcode(status)


def _collect_group(pgid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-pgid, os.WNOHANG)[0]:
            pass


def _prctl(option: int, value: int) -> None:
    """Set a process attribute on Linux; elsewhere the closing socket alone must do."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
