"""The warm server: one process with torch loaded, from which processes are forked in milliseconds.

It runs no user code and keeps one thread, so forking is safe. It is the parent of the processes it
forks: it reports how each ended, and ends them and itself when its owner ends.
"""

from __future__ import annotations

import contextlib
import ctypes
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
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from unisono import accelerator
from unisono.launch.pool.cleanup import end_group, end_processes_of, remove_left_directories

PRELOAD = ("cloudpickle", "numpy.random", "torch", "torch.distributed", "unisono.comm")
"""Loaded before the first fork."""
PRELOAD_WHEN_IDLE = ("torch._dynamo",)
"""Loaded after the first job: the first optimizer of a rank would spend seconds on it."""
PAUSE_S = 1.0
"""So long without ranks counts as idle."""
_LOOK_S = 5.0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_ORDER = (signal.SIGTERM,)


def serve(data: dict[str, Any], control_fd: int) -> NoReturn:
    """Serve until the owner has ended; in a forked process, run what was requested.

    That happens here, at the bottom of the stack, so the process ends as any interpreter does.

    Args:
        data: `owner_pid`, the parent of this process, without which the server ends, `preload`,
            more modules to load first (one that cannot be loaded is left out), and `idle_s`, how
            long it stays without ranks.
        control_fd: socket on which requests come, see `WarmServer.fork`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner decides what Ctrl-C means
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    load((*PRELOAD, "unisono.launch.pool.rank"))
    importlib.import_module("torch").set_num_threads(1)
    for name in ("unisono._core", *data["preload"]):
        with contextlib.suppress(Exception):  # then a rank that imports it says so
            load((name,))
    later = () if data["preload"] else PRELOAD_WHEN_IDLE
    main = Server(socket.socket(fileno=control_fd), data["owner_pid"], data["idle_s"], later).run()
    if main is not None:
        main()
    os._exit(0)


def load(names: Iterable[str]) -> None:
    """Import modules, then freeze the heap so that forks share its memory."""
    for name in names:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def refusal() -> str | None:
    """Return why this process must not fork, or None."""
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads != 1:
        return f"the warm server has {threads} threads"
    if (kind := accelerator.initialised()) is not None:
        return f"{kind} is initialised in the warm server"
    return None


class _Child:
    """A forked process that has not ended."""

    def __init__(self, request: dict[str, Any], status_fd: int) -> None:
        self.data: dict[str, str] = request["data"]
        self.linger_s: float | None = request["linger_s"]
        self.status_fd = status_fd

    def tell(self, news: str) -> None:
        with contextlib.suppress(OSError):  # the owner has stopped listening
            os.write(self.status_fd, news.encode())


class Server:
    """Forks processes on request and reports how they end."""

    def __init__(
        self, control: socket.socket, owner_pid: int, idle_s: float, later: Sequence[str]
    ) -> None:
        self._control = control
        self._owner_pid = owner_pid
        self._idle_s = idle_s
        self._children: dict[int, _Child] = {}
        self._has_served = False
        self._later = later
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: control.shutdown(socket.SHUT_RDWR))

    def run(self) -> Callable[[], object] | None:
        """Return what to run in a forked process, or None when the server is to end."""
        last_busy = time.monotonic()
        while True:
            pause_s = PAUSE_S if self._may_load_more() else _LOOK_S
            events = self._selector.select(min(pause_s, self._idle_s))
            self._reap()
            now = time.monotonic()
            if events or self._children:
                last_busy = now
            is_orphan = os.getppid() != self._owner_pid
            if is_orphan or (not self._children and now - last_busy >= self._idle_s):
                return self._end()
            if not events and self._may_load_more():
                later, self._later = self._later, ()
                load(later)
            for key, _ in events:
                if key.fd == self._wake_read:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_read, 4096)
                    continue
                try:
                    message, fds, _, _ = socket.recv_fds(self._control, 1 << 18, 16)
                except OSError:
                    return self._end()
                if not message:
                    return self._end()
                main = self._fork(json.loads(message), fds)
                if main is not None:
                    return main

    def _may_load_more(self) -> bool:
        """Whether a job has run, none is running, and something is left to load."""
        return bool(self._later) and self._has_served and not self._children

    def _fork(self, request: dict[str, Any], fds: list[int]) -> Callable[[], object] | None:
        """Fork a process for a request; return what to run in it, and None in the server."""
        child = _Child(request, fds[0])
        if missing := [name for name in request["preload"] if name not in sys.modules]:
            load(missing)
        if (why := refusal()) is not None:
            child.tell(f"refused {why}\n")
            for fd in fds:
                os.close(fd)
            return None
        self._has_served = True
        server_pid = os.getpid()
        # An early order to stop is the child's: our own handler would end the server's socket.
        signal.pthread_sigmask(signal.SIG_BLOCK, _ORDER)
        pid = os.fork()
        if pid:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _ORDER)
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)
            for fd in fds[1:]:
                os.close(fd)
            self._children[pid] = child
            child.tell(f"started {pid}\n")
            return None
        os.setpgid(0, 0)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server_pid:
            os._exit(1)
        self._leave_to_the_parent()
        os.close(child.status_fd)
        streams: list[int] = request["streams"]
        for source, target in zip(fds[1:], streams, strict=False):
            os.dup2(source, target)
            os.close(source)
        if streams:
            # The server's streams belong to a file; these descriptors are now the child's own.
            sys.stdout = sys.__stdout__ = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
            sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        module, _, function = request["main"].partition(":")
        main = getattr(importlib.import_module(module), function)
        return lambda: main(child.data, *fds[1 + len(streams) :])

    def _leave_to_the_parent(self) -> None:
        """Release everything of the server in a forked process."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ORDER)
        self._selector.close()
        self._control.close()
        others = (child.status_fd for child in self._children.values())
        for fd in (self._wake_read, self._wake_write, *others):
            os.close(fd)

    def _reap(self) -> None:
        """Collect processes that have ended: forked ones, and those that they left behind."""
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            pid = ended.si_pid
            child = self._children.pop(pid, None)
            if child is not None and child.linger_s is not None:
                end_group(pid, _own_children, child.linger_s)
            _, status, usage = os.wait4(pid, 0)
            if child is not None:
                if child.linger_s is not None:
                    self._end_orphans(child.data)
                code = os.waitstatus_to_exitcode(status)
                child.tell(f"ended {code} {usage.ru_maxrss / 1024:.1f}\n")
                os.close(child.status_fd)

    def _end_orphans(self, data: dict[str, str]) -> None:
        """End what a rank has started in other groups: such processes are our children now."""
        if "UNISONO_RUN_ID" in data and set(_own_children()) - set(self._children):
            end_processes_of(data["UNISONO_RUN_ID"], data["RANK"])
        if not self._children:  # all that is left was started by ranks
            for pid in _own_children():
                _kill(pid)

    def _end(self) -> None:
        """End all forked processes and remove what they left behind."""
        for pid, child in self._children.items():
            child.linger_s = child.linger_s or 0.0  # its group ends behind it
            _kill(pid)
        while self._children:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            self._reap()
        remove_left_directories(None)


def _own_children() -> list[int]:
    """Return the children of this process; nothing where the system does not tell."""
    try:
        return [int(pid) for pid in Path("/proc/thread-self/children").read_text().split()]
    except OSError:
        return []


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def reseed() -> None:
    """Seed this process afresh: a fork copies the state of all generators."""
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()


def _prctl(option: int, value: int) -> None:
    """Set a process attribute; the server runs on Linux only."""
    ctypes.CDLL(None).prctl(option, int(value), 0, 0, 0)
