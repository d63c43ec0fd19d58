"""What scripts of the tests become that are forked from a warm server, as if `python` was typed.

`conftest.py` starts the server, which loads this module, and asks it for two processes for each
script: one is the script, the other the script's own warm server, which a plain process would start
by exec. So a script costs what it does itself, and not the loading of torch, twice.

`listen` waits at a socket with a name instead: there `warm_python.py` asks, a command that stands
for `python` where others (mpiexec, torchrun) start the processes.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import importlib
import json
import os
import pkgutil
import random
import runpy
import select
import selectors
import signal
import socket
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PRELOAD = (
    "numpy",
    "torch",
    "torch.distributed",
    "torch._dynamo",  # what the first optimizer of a process imports, for seconds
    "torch._inductor.lowering",  # what the first compilation imports, whatever its backend
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "torch.distributed.run",
    "torch.distributed.tensor.parallel",
    "pytest",
    "sklearn.datasets",
    "matplotlib.figure",
    "matplotlib.pyplot",
)
"""Everything of unisono is loaded behind these."""
LEAN = Path(__file__).parent / "testing" / "sessions" / "lean.py"


def listen(request: dict[str, Any], door_fd: int, leash_fd: int) -> None:
    """Fork a process for each command that comes to the door, and end with the end of the leash."""
    door, leash = socket.socket(fileno=door_fd), socket.socket(fileno=leash_fd)
    sys.path[:] = request["path"]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    selector = selectors.DefaultSelector()
    selector.register(door, selectors.EVENT_READ)
    selector.register(leash, selectors.EVENT_READ)
    running: dict[int, tuple[int, socket.socket]] = {}  # by the descriptor of the process
    while True:
        ready = [key for key, _ in selector.select()]
        if any(key.fileobj is leash for key in ready):
            for pid, _ in running.values():
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            os._exit(0)
        for key in ready:
            if key.fileobj is door:
                line, _ = door.accept()
                message, fds, _, _ = socket.recv_fds(line, 1 << 18, 250)
                if not message:
                    line.close()
                    continue
                pid = os.fork()
                if pid == 0:
                    selector.close()
                    for end in (door, leash, line, *(other for _, other in running.values())):
                        end.close()
                    for fd in running:
                        os.close(fd)
                    be_python(json.loads(message), fds)
                for fd in fds:
                    os.close(fd)
                process = os.pidfd_open(pid)
                running[process] = pid, line
                selector.register(process, selectors.EVENT_READ, process)
                selector.register(line, selectors.EVENT_READ, process)
            elif key.fd == key.data:  # it has ended
                pid, line = running.pop(key.fd)
                _, status = os.waitpid(pid, 0)
                with contextlib.suppress(OSError):  # nobody waits for it
                    line.send(b"%d" % os.waitstatus_to_exitcode(status))
                selector.unregister(key.fd)
                with contextlib.suppress(KeyError):
                    selector.unregister(line)
                line.close()
                os.close(key.fd)
            elif key.data in running:
                pid, line = running[key.data]
                number = line.recv(100)  # a signal to pass on; nothing if the command was killed
                if not number:
                    selector.unregister(line)
                os.kill(pid, int(number or signal.SIGKILL))


def be_script(request: dict[str, Any], control_fd: int) -> None:
    """Become `python WORDS` in the directory and with the variables of the request."""
    settle(request)
    sys.executable = os.environ.get("WARM_PYTHON", sys.executable)
    hand_over(socket.socket(fileno=control_fd), request["server_pid"])
    runpy.run_path(str(LEAN))  # for pools of ranks that it starts
    live(functools.partial(run, request["words"]), unload=request["unload"])


def be_python(request: dict[str, Any], fds: list[int]) -> None:
    """Become the process that `warm_python.py` stands for."""
    os.setsid()
    # Out of the way of their targets first.
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 1000) for fd in fds]
    for fd in fds:
        os.close(fd)
    targets: list[int] = request["targets"]
    for fd, target in zip(high, targets, strict=False):
        os.dup2(fd, target)
    enter(high[len(targets) :])
    for fd in high:
        os.close(fd)
    settle(request)
    if request["more_path"]:
        sys.path[:0] = request["more_path"]
        importlib.import_module("torch")._import_device_backends()  # what that path adds to torch
    os.getppid = functools.partial(parent_of, request["pid"], os.getpid(), os.getppid)
    sys.executable = os.environ.get("WARM_PYTHON", sys.executable)
    if request["unbuffered"]:
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)
    for action in request["warnings"]:
        warnings.simplefilter(action)
    live(functools.partial(run, request["words"]))


def parent_of(command: int, stand_in: int, real: Callable[[], int]) -> int:
    """Return who started the command, to the process that stands for it; others know better."""
    if os.getpid() != stand_in:
        return real()
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{command}/stat").read_text().rpartition(")")[2].split()[1])
    return 1  # the command is gone


def enter(spaces: Sequence[int]) -> None:
    """Go to the namespaces behind these descriptors, where they are others than ours."""
    for name, fd in zip(("net", "uts", "mnt"), spaces, strict=True):
        if os.fstat(fd).st_ino == Path(f"/proc/self/ns/{name}").stat().st_ino:
            continue
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(fd, 0):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {name}")


def settle(request: dict[str, Any]) -> None:
    """Take over directory and variables of the request; forget what is the warm process's own."""
    sys.path[:] = request.get("path", sys.path)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)
    tempfile.tempdir = None
    random.seed()
    importlib.import_module("numpy").random.seed()
    importlib.invalidate_caches()


def live(work: Callable[[], None], *, unload: bool = False) -> None:
    """Do the work and end as an interpreter does, but without unloading torch, for half a second.

    With `unload`, after an exception, and where MPI was entered, only a real end is like one: that
    is left to the interpreter.
    """
    code: object = None
    try:
        work()
    except SystemExit as end:
        code = end.code
    if unload or "mpi4py.MPI" in sys.modules:
        raise SystemExit(code)
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit((code or 0) & 0xFF)


def run(words: list[str]) -> None:
    """Do what `python WORDS` does."""
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path.insert(0, "")
        exec(compile(words[1], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).absolute().parent))
        main.__file__ = words[0]
        exec(compile(Path(words[0]).read_bytes(), words[0], "exec"), main.__dict__)


def hand_over(control: socket.socket, server_pid: int) -> None:
    """Let `unisono.run` of this process find the server that was forked beside it."""
    from unisono.launch.pool import client

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

    class ForkedServer(client.WarmServer):
        def __init__(self) -> None:
            self.owner_pid = os.getpid()
            self.key = client._frozen_surroundings()
            self._control = control
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115
            self._process = Sibling()

    client._server = ForkedServer()


def load_everything() -> None:
    """Load what scripts may want."""
    import unisono

    own = pkgutil.walk_packages(unisono.__path__, "unisono.")
    for name in (*PRELOAD, *(module.name for module in own if module.name != "unisono.__main__")):
        with contextlib.suppress(ImportError):  # then the script that wants it says so
            importlib.import_module(name)


load_everything()
