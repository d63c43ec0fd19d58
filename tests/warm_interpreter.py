"""An interpreter with torch loaded, from which scripts are forked as if `python` had been typed.

Started by `conftest.py`, with a socket on which requests come. For each it forks two processes: one
is the script, the other the script's warm server, which a plain process would start by exec. So a
script costs what it does itself, and not the loading of torch, twice.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

PRELOAD = (
    "numpy",
    "torch",
    "torch.distributed",
    "torch._dynamo",  # what the first optimizer of a process imports, for seconds
    "sklearn.datasets",
    "matplotlib.figure",
    "unisono.comm",
    "unisono.launch.rank",
    "unisono.launch.warm",
)


def serve(control: socket.socket) -> Callable[[], None]:
    """Answer requests until the tests are over; in a forked process, return what it is to do."""
    control.send(b"{}")
    while True:
        message, fds, _, _ = socket.recv_fds(control, 1 << 18, 2)
        if not message:
            os._exit(0)
        request = json.loads(message)
        launcher, server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        me = os.getpid()
        server_pid = os.fork()
        if server_pid == 0:
            for end in (control, launcher):
                end.close()
            for fd in fds:
                os.close(fd)
            return functools.partial(be_server, server, me)
        server.close()
        script_pid = os.fork()
        if script_pid == 0:
            control.close()
            return functools.partial(be_script, request, fds, launcher, server_pid)
        launcher.close()
        for fd in fds:
            os.close(fd)
        control.send(json.dumps({"pid": script_pid}).encode())
        _, status = os.waitpid(script_pid, 0)
        os.waitpid(server_pid, 0)  # it leaves when the script's end of their socket closes
        control.send(json.dumps({"code": os.waitstatus_to_exitcode(status)}).encode())


def be_server(control: socket.socket, launcher_pid: int) -> None:
    """Fork ranks for the script."""
    from unisono.launch.server import serve as serve_ranks

    os.setpgid(0, 0)
    serve_ranks(control.detach(), launcher_pid)


def be_script(
    request: dict[str, Any], fds: list[int], control: socket.socket, server_pid: int
) -> None:
    """Become `python WORDS` in the directory and with the variables of the request."""
    os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    for fd, target in zip(fds, (1, 2), strict=True):
        os.dup2(fd, target)
        os.close(fd)
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)
    tempfile.tempdir = None
    random.seed()
    importlib.import_module("numpy").random.seed()
    importlib.invalidate_caches()
    hand_over(control, server_pid)
    words: list[str] = request["words"]
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).absolute().parent))
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        main.__file__ = words[0]
        exec(compile(Path(words[0]).read_bytes(), words[0], "exec"), main.__dict__)


def hand_over(control: socket.socket, server_pid: int) -> None:
    """Let `unisono.run` of this process find the server that was forked beside it."""
    from unisono.launch import warm

    class Sibling:
        """As much of `Popen` as a handle on the server needs."""

        pid, returncode = server_pid, None

        def __init__(self) -> None:
            self._end = os.pidfd_open(server_pid)

        def poll(self) -> int | None:
            return self._wait(0.0)

        def wait(self, timeout: float | None = None) -> int | None:
            return self._wait(timeout)

        def kill(self) -> None:
            os.kill(server_pid, signal.SIGKILL)

        def _wait(self, timeout: float | None) -> int | None:
            return 0 if select.select([self._end], [], [], timeout)[0] else None

    class ForkedServer(warm.WarmServer):
        def __init__(self) -> None:
            self.owner_pid = os.getpid()
            self.key = warm._frozen_surroundings()
            self._control = control
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115
            self._process = Sibling()

    warm._server = ForkedServer()


def start() -> Callable[[], None]:
    """Load everything, then serve."""
    control = socket.socket(fileno=int(sys.argv[1]))
    del sys.path[0]  # the directory of this file, which is no place to import from
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in PRELOAD:
        with contextlib.suppress(ImportError):  # then the script that wants it says so
            importlib.import_module(name)
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads != 1:
        raise SystemExit(f"{threads} threads after loading: a fork would lose all but one")
    gc.collect()
    gc.freeze()
    return serve(control)


if __name__ == "__main__":
    start()()
