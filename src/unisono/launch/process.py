"""One rank as its launcher sees it: a process, its pipes, its log, and how it ended.

`SpawnedRank` is a fresh interpreter, a child of ours; `ForkedRank` was forked by the warm server,
which tells how it ended.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from unisono.launch.leftovers import end_processes_of
from unisono.launch.logs import RankLog
from unisono.launch.messages import (
    Failed,
    Hello,
    Message,
    MessageReader,
    Returned,
    Standing,
    send_order,
)
from unisono.launch.parcel import Parcel, nameless_file

_CHUNK = 1 << 20
"""Bytes read at a time, and the size of the pipes for output where the system allows it."""
_BOOTSTRAP = (
    "import os, sys; f = int(sys.argv[-4]); p = int.from_bytes(os.pread(f, 8, 0), 'little'); "
    "n = int.from_bytes(os.pread(f, 8, p), 'little'); "
    "sys.path[:] = os.fsdecode(os.pread(f, n, p + 8)).split('\\0'); "
    "from unisono.launch.rank import main; main()"
)


@dataclass(frozen=True)
class Pipes:
    """The descriptors that connect a launcher with one rank."""

    report: tuple[int, int]
    control: tuple[int, int]
    result: int
    """A nameless file for what the rank returns, if that is long; both sides have it open."""
    stdout: tuple[int, int]
    stderr: tuple[int, int]
    log: RankLog
    stack_path: Path

    @classmethod
    def open(cls, rank: int, job_dir: Path) -> Pipes:
        """Make the pipes and the log of `rank`."""
        log = RankLog(job_dir / f"rank-{rank}.log")
        stack = job_dir / f"rank-{rank}.stack"
        ends = (os.pipe(), os.pipe(), nameless_file(), _wide_pipe(), _wide_pipe())
        return cls(*ends, log, stack)

    @property
    def theirs(self) -> tuple[int, int, int, int, int]:
        """The rank's ends: report, control, result, stdout, stderr."""
        return self.report[1], self.control[0], self.result, self.stdout[1], self.stderr[1]

    def close_theirs(self) -> None:
        """Close the rank's ends in this process, so that its end can be noticed."""
        for fd in self.theirs:
            if fd != self.result:
                os.close(fd)

    def close_ours(self) -> None:
        """Close our ends."""
        self.log.close()
        for fd in (self.report[0], self.control[1], self.result, self.stdout[0], self.stderr[0]):
            os.close(fd)


def _wide_pipe() -> tuple[int, int]:
    """Return a pipe that takes much before its writer has to wait."""
    ends = os.pipe()
    if hasattr(fcntl, "F_SETPIPE_SZ"):
        with suppress(OSError):  # beyond what this user may have
            fcntl.fcntl(ends[1], fcntl.F_SETPIPE_SZ, _CHUNK)
    return ends


class ServerGone(Exception):
    """The warm server has ended, or does not answer."""


class RankProcess(ABC):
    """A rank that was started, with everything it has said so far."""

    def __init__(self, rank: int, pid: int, pipes: Pipes) -> None:
        self.rank = rank
        self.pid = pid
        self.pipes = pipes
        self.log = pipes.log
        self.stack_path = pipes.stack_path
        self.hello: Hello | None = None
        self.is_ready = False
        self.returned: Returned | None = None
        self.is_requeued = False
        self.lingering: tuple[str, ...] = ()
        self.finishing_s = 0.0
        self.standing: Standing | None = None
        self.failed: Failed | None = None
        self.failed_at = 0.0
        self.exit_code: int | None = None
        self.peak_mb: float | None = None
        self._reader = MessageReader()

    @property
    @abstractmethod
    def end_fd(self) -> int | None:
        """A descriptor that becomes readable when the process has ended, where there is one."""

    @abstractmethod
    def collect(self) -> None:
        """Wait for the end of the process, end its group, and keep its status."""

    @property
    def report_fd(self) -> int:
        """Where its messages come."""
        return self.pipes.report[0]

    @property
    def output_fds(self) -> tuple[int, int]:
        """Where its stdout and its stderr come."""
        return self.pipes.stdout[0], self.pipes.stderr[0]

    @property
    def is_running(self) -> bool:
        """Whether its end has not been noted yet."""
        return self.exit_code is None

    @property
    def is_done(self) -> bool:
        """Whether its function has come to a good end: it returned, or asked to be requeued."""
        return self.returned is not None or self.is_requeued

    @property
    def is_bad(self) -> bool:
        """Whether it failed, or ended without a result."""
        return self.failed is not None or (not self.is_running and not self.is_done)

    def value(self) -> Parcel | None:
        """Return what its function returned, if it has; good also after `close`."""
        if self.returned is None:
            return None
        if self.returned.value is not None:
            return Parcel(self.returned.value)
        return Parcel(fd=os.dup(self.pipes.result), is_owner=True)

    def read_messages(self) -> list[Message] | None:
        """Return the messages that have come; None when the rank can send no more."""
        data = read_available(self.report_fd)
        if data == b"":
            return None
        return self._reader.feed(data or b"")

    def order(self, **order: object) -> None:
        """Send the rank an order. If it has gone, its exit status tells more than this could."""
        with suppress(OSError):
            send_order(self.pipes.control[1], **order)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the rank alone."""
        if self.is_running:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, number)

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to the rank and all it started in its process group."""
        if self.is_running:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def close(self) -> None:
        """Close all descriptors."""
        self.pipes.close_ours()
        if self.end_fd is not None:
            os.close(self.end_fd)


class SpawnedRank(RankProcess):
    """A rank in an interpreter of its own."""

    def __init__(
        self, rank: int, process: subprocess.Popen[bytes], pipes: Pipes, run_id: str
    ) -> None:
        super().__init__(rank, process.pid, pipes)
        self._process = process
        self._run_id = run_id
        self._pidfd = os.pidfd_open(process.pid) if hasattr(os, "pidfd_open") else None

    @property
    def end_fd(self) -> int | None:
        """The process descriptor, where the system has such a thing."""
        return self._pidfd

    def collect(self) -> None:
        """Wait for the end of the process, end its group, and keep its status."""
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        # While the leader is a zombie its number is not given away: the group is still ours.
        self.signal_group(signal.SIGKILL)
        try:
            _, status, usage = os.wait4(self.pid, 0)
        except ChildProcessError:  # somebody else in this process collected it
            self.exit_code = self._process.wait()
        else:
            self.exit_code = self._process.returncode = os.waitstatus_to_exitcode(status)
            self.peak_mb = usage.ru_maxrss / 1024
        end_processes_of(self._run_id, str(self.rank))


class ForkedRank(RankProcess):
    """A rank that the warm server has forked; news of its process come on a pipe of its own."""

    def __init__(self, rank: int, status_fd: int, pipes: Pipes) -> None:
        super().__init__(rank, 0, pipes)
        self._status_fd = status_fd
        self._rest = b""

    @property
    def end_fd(self) -> int:
        """The pipe on which the server tells of the end."""
        return self._status_fd

    def confirm(self, timeout_s: float) -> str | None:
        """Wait until the server has forked the rank; return why, if it refuses."""
        line = self._next_line(timeout_s)
        if line is None:
            raise ServerGone
        word, *rest = line
        if word == "started":
            self.pid = int(rest[0])
            return None
        return " ".join(rest)

    def collect(self) -> None:
        """Wait until the server has told of the end of the process, whose group it ends."""
        line = self._next_line(None)
        if line is None:  # the server is gone, and its ranks with it
            self.exit_code = -signal.SIGKILL
        else:
            self.exit_code, self.peak_mb = int(line[1]), float(line[2])

    def _next_line(self, timeout_s: float | None) -> list[str] | None:
        """Return the words of the next line of news; None at the end, or when it takes too long."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            left = None if end is None else max(0.0, end - time.monotonic())
            if not select.select([self._status_fd], [], [], left)[0]:
                return None
            data = read_available(self._status_fd)
            if data == b"":
                return None
            self._rest += data or b""
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode().split(" ")


def spawn_rank(
    rank: int,
    ranks: int,
    *,
    payload_fd: int,
    env: Mapping[str, str],
    job_dir: Path,
    kept_fds: Sequence[int] = (),
    stdin_fd: int = subprocess.DEVNULL,
) -> SpawnedRank:
    """Start a fresh interpreter as `rank`, leader of its own process group.

    `kept_fds` are descriptors of this process that the rank inherits, too; `stdin_fd` is what it
    reads from.
    """
    pipes = Pipes.open(rank, job_dir)
    report_fd, control_fd, result_fd, stdout_fd, stderr_fd = pipes.theirs
    inherited = (payload_fd, report_fd, control_fd, result_fd)
    flags: list[str] = subprocess._args_from_interpreter_flags()  # pyright: ignore[reportAttributeAccessIssue]
    label = f"unisono rank {rank} of {ranks}"
    try:
        process = subprocess.Popen(
            [sys.executable, *flags, "-c", _BOOTSTRAP, label, *map(str, inherited)],
            stdin=stdin_fd,
            stdout=stdout_fd,
            stderr=stderr_fd,
            pass_fds=(*inherited, *kept_fds),
            env=env,
            process_group=0,
        )
    except BaseException:
        pipes.close_ours()
        raise
    finally:
        pipes.close_theirs()
    return SpawnedRank(rank, process, pipes, env["UNISONO_RUN_ID"])


def read_available(fd: int) -> bytes | None:
    """Read from a descriptor that does not block: b"" at the end, None if nothing has come."""
    try:
        return os.read(fd, _CHUNK)
    except BlockingIOError:
        return None
    except OSError:
        return b""
