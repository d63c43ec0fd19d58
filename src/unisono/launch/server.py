"""The warm server: one process with torch loaded, from which ranks are forked in milliseconds.

It runs no user code and keeps one thread, so a fork of it is sound. It is the parent of its ranks:
it reports how each ended, and when the launcher goes away it ends them and itself.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import random
import selectors
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from unisono.launch.leftovers import end_processes_of, remove_orphaned_directories

PRELOAD = ("cloudpickle", "numpy", "torch", "torch.distributed", "unisono.comm")
"""Loaded before the first fork."""
PRELOAD_WHEN_IDLE = ("torch._dynamo",)
"""Loaded after the first job: the first optimizer of a rank would spend seconds on it."""
PAUSE_S = 1.0
"""So long without ranks counts as idle."""
IDLE_S = 300.0
"""Without ranks for so long, the server leaves; `UNISONO_SERVER_IDLE_S` sets it."""
_LOOK_S = 5.0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PDEATH_KILL = signal.SIGKILL
_ORDER = (signal.SIGTERM,)


@dataclass(frozen=True)
class Assignment:
    """What a forked process is to be."""

    own: dict[str, str]
    """The variables that this rank alone gets."""
    payload_fd: int
    report_fd: int
    control_fd: int
    result_fd: int


def serve(control_fd: int, launcher_pid: int) -> NoReturn:
    """Serve until the launcher is gone; in a forked rank, be that rank.

    The rank's life begins here at the bottom of the stack, so it ends as any interpreter does.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides what Ctrl-C means
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    preload()
    idle_s = float(os.environ.get("UNISONO_SERVER_IDLE_S") or IDLE_S)
    server = Server(socket.socket(fileno=control_fd), launcher_pid, idle_s)
    assignment = server.run()
    if assignment is None:
        os._exit(0)
    from unisono.launch.rank import live_as_forked

    live_as_forked(assignment)


def preload() -> None:
    """Load what every rank needs."""
    load((*PRELOAD, "unisono.launch.rank"))
    importlib.import_module("torch").set_num_threads(1)


def load(names: Sequence[str]) -> None:
    """Import modules, then freeze the heap so that forks share its memory."""
    for name in names:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def refusal() -> str | None:
    """Return why this process must not fork a rank; None if it may."""
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads != 1:
        return f"the warm server has {threads} threads"
    if importlib.import_module("torch").cuda.is_initialized():
        return "CUDA is initialised in the warm server"
    return None


class Server:
    """Forks ranks on request and reports how they end."""

    def __init__(self, control: socket.socket, launcher_pid: int, idle_s: float) -> None:
        self._control = control
        self._launcher_pid = launcher_pid
        self._idle_s = idle_s
        self._status_fds: dict[int, int] = {}
        self._own: dict[int, dict[str, str]] = {}
        self._has_served = False
        self._is_complete = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: control.shutdown(socket.SHUT_RDWR))

    def run(self) -> Assignment | None:
        """Return an assignment in a forked rank, None when the server is to end."""
        last_busy = time.monotonic()
        while True:
            events = self._selector.select(min(_LOOK_S, self._idle_s, self._pause_s()))
            self._reap()
            now = time.monotonic()
            if events or self._status_fds:
                last_busy = now
            is_orphan = os.getppid() != self._launcher_pid
            if is_orphan or (not self._status_fds and now - last_busy >= self._idle_s):
                return self._end()
            if not events and self._may_load_more():
                self._is_complete = True
                load(PRELOAD_WHEN_IDLE)
            for key, _ in events:
                if key.fd == self._wake_read:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_read, 4096)
                    continue
                try:
                    message, fds, _, _ = socket.recv_fds(self._control, 1 << 16, 8)
                except OSError:
                    return self._end()
                if not message:
                    return self._end()
                assignment = self._fork(json.loads(message), fds)
                if assignment is not None:
                    return assignment

    def _may_load_more(self) -> bool:
        """Whether there was a job, none is running, and something is left to load."""
        return self._has_served and not self._status_fds and not self._is_complete

    def _pause_s(self) -> float:
        return PAUSE_S if self._may_load_more() else _LOOK_S

    def _fork(self, own: dict[str, str], fds: list[int]) -> Assignment | None:
        payload_fd, report_fd, control_fd, result_fd, *others = fds
        stdout_fd, stderr_fd, status_fd, *stdin = others
        if (why := refusal()) is not None:
            os.write(status_fd, f"refused {why}\n".encode())
            for fd in fds:
                os.close(fd)
            return None
        self._has_served = True
        server_pid = os.getpid()
        # An early order to stop is the rank's: our own handler would end the server's socket.
        signal.pthread_sigmask(signal.SIG_BLOCK, _ORDER)
        pid = os.fork()
        if pid:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _ORDER)
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)
            for fd in fds:
                if fd != status_fd:
                    os.close(fd)
            self._status_fds[pid], self._own[pid] = status_fd, own
            self._tell(status_fd, f"started {pid}\n")
            return None
        os.setpgid(0, 0)
        _prctl(_PR_SET_PDEATHSIG, _PDEATH_KILL)
        if os.getppid() != server_pid:
            os._exit(1)
        self._leave_to_the_parent()
        for source, target in (*((fd, 0) for fd in stdin), (stdout_fd, 1), (stderr_fd, 2)):
            os.dup2(source, target)
            os.close(source)
        os.close(status_fd)
        return Assignment(own, payload_fd, report_fd, control_fd, result_fd)

    def _leave_to_the_parent(self) -> None:
        """In a forked rank: drop all that belongs to the server."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ORDER)
        self._selector.close()
        self._control.close()
        for fd in (self._wake_read, self._wake_write, *self._status_fds.values()):
            os.close(fd)

    def _reap(self) -> None:
        """Collect every child that has ended: ranks, and what they left behind."""
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            pid = ended.si_pid
            if pid in self._status_fds:  # while it is a zombie its group cannot be another's
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
            _, status, usage = os.wait4(pid, 0)
            status_fd = self._status_fds.pop(pid, None)
            if status_fd is not None:
                self._end_orphans(self._own.pop(pid))
                code = os.waitstatus_to_exitcode(status)
                self._tell(status_fd, f"ended {code} {usage.ru_maxrss / 1024:.1f}\n")
                os.close(status_fd)

    def _end_orphans(self, own: dict[str, str]) -> None:
        """End what a rank that has ended started in other groups; such processes are ours now."""
        if set(_children()) - set(self._status_fds):
            end_processes_of(own["UNISONO_RUN_ID"], own["RANK"])
        if not self._status_fds:  # nobody else can have started what is left
            for pid in _children():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)

    def _tell(self, status_fd: int, news: str) -> None:
        with contextlib.suppress(OSError):  # the launcher has stopped listening
            os.write(status_fd, news.encode())

    def _end(self) -> None:
        """End all ranks and clear away what they could not."""
        for pid in self._status_fds:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        while self._status_fds:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            self._reap()
        with contextlib.suppress(Exception):
            from unisono.comm.engines.shm.segment import sweep

            sweep()
        remove_orphaned_directories(None)


def _children() -> list[int]:
    """Return the children of this process; nothing where the system does not tell."""
    try:
        return [int(pid) for pid in Path("/proc/thread-self/children").read_text().split()]
    except OSError:
        return []


def reseed() -> None:
    """Give this process random numbers of its own: a fork copies the state of all generators."""
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()


def _prctl(option: int, value: int) -> None:
    """Set a process attribute; the server runs on Linux only."""
    import ctypes

    ctypes.CDLL(None).prctl(option, int(value), 0, 0, 0)
