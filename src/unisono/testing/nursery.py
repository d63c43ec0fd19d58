"""The pool's handle on its warm process: start it, fork ranks from it, learn how they ended.

What runs in the warm process is in `warm.py`. Starting takes about two seconds (importing torch),
so `Nursery` starts in the background and only the first `fork` waits for it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

from unisono.errors import RankFailed

PREFIX = "unisono-ranks-"
"""Start of the name of a pool's private directory; the owner's pid follows."""

_BOOT = """
import sys
sys.path[:] = {path!r}
from unisono.testing.warm import serve
serve({fd}, {directory!r}, {pid})
"""


def absolute_path() -> list[str]:
    """Return `sys.path` of this process, good in any working directory."""
    return [str(Path(entry).absolute()) for entry in sys.path]


class Nursery:
    """One warm process and its private directory. Must be used from the process that made it."""

    def __init__(self, start_timeout_s: float = 120.0) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
        self._start_timeout_s = start_timeout_s
        self._errors = self.directory / "warm.err"
        self._control, theirs = socket.socketpair()
        boot = _BOOT.format(
            path=absolute_path(),
            fd=theirs.fileno(),
            directory=str(self.directory),
            pid=os.getpid(),
        )
        with theirs, self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-c", boot],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # so that Ctrl-C reaches the test process alone
            )
        self._ready = False
        self._serial = 0
        self._answers = b""

    @property
    def pid(self) -> int:
        """Process id of the warm process."""
        return self._process.pid

    def fileno(self) -> int:
        """File descriptor of the control socket in this process."""
        return self._control.fileno()

    def is_alive(self) -> bool:
        """Whether the warm process still runs."""
        return self._process.poll() is None

    def fork(self, rank: int) -> tuple[int, Connection]:
        """Start a process for `rank`; return its pid and the connection to it."""
        if not self._ready:
            self._expect(self._start_timeout_s)
            self._ready = True
        ours, theirs = socket.socketpair()
        with theirs:
            self._serial += 1
            request = b"fork %d %d\n" % (self._serial, rank)
            socket.send_fds(self._control, [request], [theirs.fileno()])
        pid = self._expect(30.0)
        return pid, Connection(ours.detach())

    def reap(self, pid: int, *, kill: bool) -> int:
        """End process `pid` and its children; return its exit code or minus the signal number."""
        self._serial += 1
        self._control.sendall(b"reap %d %d %d\n" % (self._serial, pid, kill))
        return self._expect(30.0)

    def close(self) -> None:
        """End the warm process and all ranks; remove the directory."""
        self._control.close()
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _expect(self, timeout_s: float) -> int:
        """Read the answer to the last request; an older one belongs to an interrupted call."""
        deadline = time.monotonic() + timeout_s
        while True:
            while b"\n" not in self._answers:
                self._control.settimeout(max(0.001, deadline - time.monotonic()))
                try:
                    chunk = self._control.recv(64)
                except (TimeoutError, ConnectionResetError):
                    chunk = b""
                finally:
                    self._control.settimeout(None)
                if not chunk:
                    raise self._failure(timeout_s)
                self._answers += chunk
            line, _, self._answers = self._answers.partition(b"\n")
            serial, answer = (int(word) for word in line.split())
            if serial == self._serial:
                return answer

    def _failure(self, timeout_s: float) -> RankFailed:
        tail = ""
        with contextlib.suppress(OSError):
            tail = self._errors.read_text(errors="replace")[-4000:]
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(0.2)
        how = f"did not answer in {timeout_s:g} s" if code is None else f"ended with code {code}"
        return RankFailed(
            f"the process that starts the ranks {how}\n{tail}", exit_code=code, log_tail=tail
        )
