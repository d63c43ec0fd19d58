"""The launcher's handle on its warm server: start it, ask it for ranks, end it.

One server for each launcher process, started by exec at the first need and ended with the process.
What runs inside it is in `server.py`.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from unisono.launch.devices import is_cuda_initialized
from unisono.launch.process import ServerGone

_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from unisono.launch.server import serve; serve(int(sys.argv[2]), int(sys.argv[3]))"
)
_FROZEN = ("LD_", "PYTHON", "MALLOC_", "GLIBC_", "TORCH_CPP_")
"""Starts of names of variables that only a new process takes in."""
_SINGLE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_OF_RUNS = ("UNISONO_TRACE", "UNISONO_CHECK", "RANK", "WORLD_SIZE", "LOCAL_RANK")
_LEAVE_S = 10.0


class WarmServer:
    """A running server."""

    def __init__(self) -> None:
        self.owner_pid = os.getpid()
        self.key = _frozen_surroundings()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  it lives as long as the server
        search_path = json.dumps([str(Path(entry).absolute()) for entry in sys.path])
        flags: list[str] = subprocess._args_from_interpreter_flags()  # pyright: ignore[reportAttributeAccessIssue]
        env = {k: v for k, v in os.environ.items() if k not in _OF_RUNS}
        env |= dict.fromkeys(_SINGLE_THREAD, "1")
        env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch reads it once, when it is imported
        words = (search_path, str(theirs.fileno()), str(self.owner_pid), "unisono launch server")
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, *flags, "-c", _BOOTSTRAP, *words],
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
                pass_fds=[theirs.fileno()],
                env=env,
                cwd="/",  # the directory of a run may be removed while the server lives
                process_group=0,
            )

    @property
    def fds(self) -> tuple[int, int]:
        """Descriptors that this process keeps for the server."""
        return self._control.fileno(), self._errors.fileno()

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    @property
    def is_usable(self) -> bool:
        """Whether it is ours, runs, and would start ranks as this process is now."""
        return (
            self.owner_pid == os.getpid()
            and self._process.poll() is None
            and self.key == _frozen_surroundings()
        )

    def fork(self, own: Mapping[str, str], fds: Sequence[int]) -> None:
        """Ask for a rank; its own pipe tells what came of it. Raise `ServerGone` if nobody can."""
        try:
            socket.send_fds(self._control, [json.dumps(dict(own)).encode()], list(fds))
        except OSError as error:
            raise ServerGone from error

    def last_words(self) -> str:
        """Return what the server has printed, which is why it ended if it did."""
        size = os.fstat(self._errors.fileno()).st_size
        return os.pread(self._errors.fileno(), 4000, max(0, size - 4000)).decode(errors="replace")

    def close(self) -> None:
        """End the server and its ranks. In a fork of the launcher only our descriptors close."""
        self._control.close()
        if self.owner_pid == os.getpid():
            try:
                self._process.wait(_LEAVE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        else:
            self._process.returncode = 0  # not our child: nothing to wait for
        self._errors.close()


_server: WarmServer | None = None
_lock = threading.Lock()


def get_server() -> WarmServer:
    """Return the server of this process; starts one if there is none that can be used."""
    global _server
    with _lock:
        if _server is not None and not _server.is_usable:
            _server.close()
            _server = None
        if _server is None:
            _server = WarmServer()
        return _server


def prepare(spawn_method: str) -> None:
    """Start the server if this run will want it, and do not wait: it loads torch meanwhile."""
    if why_not(spawn_method) is None:
        get_server()


def shutdown() -> None:
    """End the warm server of this process, if it has one; the next run starts a new one."""
    global _server
    with _lock, contextlib.suppress(OSError):
        if _server is not None:
            _server.close()
        _server = None


def why_not(spawn_method: str) -> str | None:
    """Return why ranks of this process need fresh interpreters; None if they do not."""
    if spawn_method == "spawn":
        return "spawn_method='spawn'"
    if sys.platform != "linux":
        return "the warm server needs Linux"
    if is_cuda_initialized():
        return "CUDA is initialised in this process"
    return None


def _frozen_surroundings() -> tuple[object, ...]:
    """Return what a server cannot take over after its start."""
    variables = sorted((k, v) for k, v in os.environ.items() if k.startswith(_FROZEN))
    return sys.executable, tuple(variables)


def _renew_lock() -> None:
    """In a fork of the launcher: another thread may have held the lock at that moment."""
    global _lock
    _lock = threading.Lock()


atexit.register(shutdown)
os.register_at_fork(after_in_child=_renew_lock)
