"""One rank as its launcher sees it: a process, its pipes, its log, and how it ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from unisono.launch.messages import Failed, Hello, Message, MessageReader, Returned, send_order

_CHUNK = 1 << 16
_BOOTSTRAP = (
    "import os, sys; f = int(sys.argv[-3]); n = int.from_bytes(os.pread(f, 8, 0), 'little'); "
    "sys.path[:] = os.fsdecode(os.pread(f, n, 8)).split('\\0'); "
    "from unisono.launch.rank import main; main()"
)


@dataclass(eq=False, kw_only=True)
class RankProcess:
    """A rank that was started, with everything it has said so far."""

    rank: int
    process: subprocess.Popen[bytes]
    report_fd: int
    control_fd: int
    log: IO[bytes]
    stack_path: Path
    pidfd: int | None
    hello: Hello | None = None
    is_ready: bool = False
    returned: Returned | None = None
    failed: Failed | None = None
    failed_at: float = 0.0
    exit_code: int | None = None
    peak_mb: float | None = None
    _reader: MessageReader = field(default_factory=MessageReader)

    @property
    def is_running(self) -> bool:
        """Whether its end has not been noted yet."""
        return self.exit_code is None

    @property
    def is_bad(self) -> bool:
        """Whether it failed, or ended without a result."""
        return self.failed is not None or (not self.is_running and self.returned is None)

    def read_messages(self) -> list[Message] | None:
        """Return the messages that have come; None when the rank can send no more."""
        data = read_available(self.report_fd)
        if data == b"":
            return None
        return self._reader.feed(data or b"")

    def order(self, **order: object) -> None:
        """Send the rank an order. If it has gone, its exit status tells more than this could."""
        with suppress(OSError):
            send_order(self.control_fd, **order)

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to the rank and all it started in its process group."""
        if self.is_running:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, number)

    def has_ended(self) -> bool:
        """Whether the process has ended, without collecting it."""
        with suppress(ChildProcessError):
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            return os.waitid(os.P_PID, self.process.pid, options) is not None
        return True

    def collect(self) -> None:
        """Wait for the end of the process, end its group, and keep its status."""
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        # While the leader is a zombie its number is not given away: the group is still ours.
        self.signal_group(signal.SIGKILL)
        try:
            _, status, usage = os.wait4(self.process.pid, 0)
        except ChildProcessError:  # somebody else in this process collected it
            self.exit_code = self.process.wait()
        else:
            self.exit_code = self.process.returncode = os.waitstatus_to_exitcode(status)
            self.peak_mb = usage.ru_maxrss / 1024

    def close(self) -> None:
        """Close all descriptors."""
        for pipe in (self.process.stdout, self.process.stderr, self.log):
            if pipe is not None:
                pipe.close()
        for fd in (self.report_fd, self.control_fd, self.pidfd):
            if fd is not None:
                os.close(fd)


def start_rank(
    rank: int, ranks: int, *, payload_fd: int, env: Mapping[str, str], job_dir: Path
) -> RankProcess:
    """Start a fresh interpreter as `rank`, leader of its own process group."""
    log_flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    log = os.fdopen(os.open(job_dir / f"rank-{rank}.log", log_flags, 0o600), "ab", buffering=0)
    report_read, report_write = os.pipe()
    control_read, control_write = os.pipe()
    inherited = (payload_fd, report_write, control_read)
    flags: list[str] = subprocess._args_from_interpreter_flags()  # pyright: ignore[reportAttributeAccessIssue]
    label = f"unisono rank {rank} of {ranks}"
    try:
        process = subprocess.Popen(
            [sys.executable, *flags, "-c", _BOOTSTRAP, label, *map(str, inherited)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            pass_fds=inherited,
            env=env,
            process_group=0,
        )
    except BaseException:
        log.close()
        os.close(report_read)
        os.close(control_write)
        raise
    finally:
        os.close(report_write)
        os.close(control_read)
    return RankProcess(
        rank=rank,
        process=process,
        report_fd=report_read,
        control_fd=control_write,
        log=log,
        stack_path=job_dir / f"rank-{rank}.stack",
        pidfd=os.pidfd_open(process.pid) if hasattr(os, "pidfd_open") else None,
    )


def read_available(fd: int) -> bytes | None:
    """Read from a descriptor that does not block: b"" at the end, None if nothing has come."""
    try:
        return os.read(fd, _CHUNK)
    except BlockingIOError:
        return None
    except OSError:
        return b""
