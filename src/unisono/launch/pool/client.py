"""The launcher's side of the pool: the warm server, and the parent's end of one rank.

A rank is forked by the warm server, which reports how it ended, or is a fresh interpreter, a child
of this process. Each launcher process has one server, started by exec when it is first needed and
ended with the process; `server.py` is what runs inside.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from unisono import accelerator
from unisono.errors import PlatformError
from unisono.expect import number_in
from unisono.launch.logs import RankLog
from unisono.launch.pool.cleanup import all_processes, end_group, end_processes_of
from unisono.launch.pool.payload import Parcel, nameless_file
from unisono.launch.pool.protocol import RankState, read_available, take_messages

IDLE_S = 300.0
"""Without ranks for so long, the server leaves; `UNISONO_SERVER_IDLE_S` sets it."""
ANSWER_S = 120.0
"""Longest wait for the warm server, which may still be loading torch."""
_LEAVE_S = 10.0
_PIPE_BYTES = 1 << 20
"""Size of the pipes for output, where the system allows it."""
_SERVER_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from unisono.launch.pool.server import serve; "
    "serve(json.loads(sys.argv[2]), int(sys.argv[3]))"
)
_RANK_BOOTSTRAP = (
    "import os, sys; f = int(sys.argv[2]); p = int.from_bytes(os.pread(f, 8, 0), 'little'); "
    "n = int.from_bytes(os.pread(f, 8, p), 'little'); "
    "path = os.fsdecode(os.pread(f, n, p + 8)).split('\\0') if n else []; "
    "sys.path[:] = path + [e for e in sys.path if {adds} and e and e not in path]; "
    "from unisono.launch.pool.rank import main; main()"
)
_FROZEN = ("LD_", "PYTHON", "MALLOC_", "GLIBC_", "TORCH_CPP_")
"""Prefixes of variables that take effect only in a new process."""
_SINGLE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_OF_RUNS = ("UNISONO_TRACE", "UNISONO_CHECK", "RANK", "WORLD_SIZE", "LOCAL_RANK")


def interpreter_command(code: str, *words: str) -> list[str]:
    """Return the command of an interpreter with the options of this one (`-O`, `-W`, `-X`, ...).

    `sys.flags` does not tell all of them; multiprocessing uses the same private function, which
    was there in every Python from 3.11 to 3.14.
    """
    flags: list[str] = subprocess._args_from_interpreter_flags()  # pyright: ignore[reportAttributeAccessIssue]
    return [sys.executable, *flags, "-c", code, *words]


class ServerGone(Exception):
    """The warm server has ended, or does not answer."""


class WarmServer:
    """A running server. `preload` names modules to load besides what all ranks need."""

    def __init__(self, preload: Sequence[str] = ()) -> None:
        self.owner_pid = os.getpid()
        self.key = _frozen_surroundings()
        variable_s = number_in("UNISONO_SERVER_IDLE_S")
        idle_s = IDLE_S if variable_s is None else variable_s
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  it lives as long as the server
        search_path = json.dumps([str(Path(entry).absolute()) for entry in sys.path])
        env = {k: v for k, v in os.environ.items() if k not in _OF_RUNS}
        env |= dict.fromkeys(_SINGLE_THREAD, "1")
        env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch reads it once, when it is imported
        options = json.dumps(
            {"owner_pid": self.owner_pid, "preload": list(preload), "idle_s": idle_s}
        )
        words = (search_path, options, str(theirs.fileno()))
        with theirs:
            self._process = subprocess.Popen(
                interpreter_command(_SERVER_BOOTSTRAP, *words, "unisono launch server"),
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
    def is_alive(self) -> bool:
        """Whether it is ours and runs."""
        return self.owner_pid == os.getpid() and self._process.poll() is None

    def fork(
        self,
        main: str,
        data: Mapping[str, object],
        fds: Iterable[int] = (),
        *,
        streams: Mapping[int, int] | None = None,
        linger_s: float | None = 0.0,
        preload: Sequence[str] = (),
    ) -> ForkedProcess:
        """Ask for a process, leader of a group of its own; raise `ServerGone` if it has ended.

        Args:
            main: `module:function`, called as `function(data, *fds)`.
            data: plain data for it.
            fds: descriptors of this process that it gets.
            streams: its standard streams, as number in it -> descriptor of this process.
            linger_s: how long what it started may outlive it before that is killed; None: for ever.
            preload: modules that the server loads first, for this process and all after it.
        """
        streams = streams or {}
        request = {
            "main": main,
            "data": dict(data),
            "streams": list(streams),
            "linger_s": linger_s,
            "preload": list(preload),
        }
        status_read, status_write = os.pipe()
        try:
            sent = [status_write, *streams.values(), *fds]
            socket.send_fds(self._control, [json.dumps(request).encode()], sent)
        except OSError as error:
            os.close(status_read)
            raise ServerGone from error
        finally:
            os.close(status_write)
        return ForkedProcess(status_read)

    def last_words(self) -> str:
        """Return what the server has printed, which is why it ended if it did."""
        size = os.fstat(self._errors.fileno()).st_size
        return os.pread(self._errors.fileno(), 4000, max(0, size - 4000)).decode(errors="replace")

    def close(self) -> None:
        """End the server and its ranks. In a fork of its owner only our descriptors close."""
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
    """Return the server of this process; starts one if none can be used."""
    global _server
    with _lock:
        if _server is not None and not (_server.is_alive and _server.key == _frozen_surroundings()):
            _server.close()
            _server = None
        if _server is None:
            _server = WarmServer()
        return _server


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
    if (kind := accelerator.initialised()) is not None:  # what is forked could not use it
        return f"{kind} is initialised in this process"
    return None


def _frozen_surroundings() -> tuple[object, ...]:
    """Return the settings that a running server cannot change."""
    variables = [(k, v) for k, v in os.environ.items() if k.startswith(_FROZEN)]
    return sys.executable, sorted(variables)


def _renew_lock() -> None:
    """Replace the lock in a fork of the launcher: another thread may have held it."""
    global _lock
    _lock = threading.Lock()


atexit.register(shutdown)
os.register_at_fork(after_in_child=_renew_lock)


class Process:
    """The process of a rank, which may not have been started yet.

    Attributes:
        pid: its number.
        end_fd: becomes readable when it has ended, where the system supports that.
    """

    pid = 0
    end_fd: int | None = None

    def wait(self) -> tuple[int, float | None]:
        """Wait for its end, end its group; return its exit code and its peak memory in MB."""
        raise NotImplementedError


class ForkedProcess(Process):
    """A process that the warm server has forked; a pipe reports its start and its end."""

    def __init__(self, status_fd: int) -> None:
        self.end_fd = self._status_fd = status_fd
        self._news = select.poll()  # `select` knows no descriptor from 1024 on
        self._news.register(status_fd, select.POLLIN)
        self._rest = b""

    def confirm(self, timeout_s: float) -> str | None:
        """Wait until the server has forked it; return the reason if it refuses."""
        line = self._next_line(timeout_s)
        if line is None:
            raise ServerGone
        word, *rest = line
        if word == "started":
            self.pid = int(rest[0])
            return None
        return " ".join(rest)

    def wait(self, timeout_s: float | None = None) -> tuple[int, float | None]:
        """Wait until the server reports the end of the process, whose group it ends."""
        line = self._next_line(timeout_s)
        if line is None:  # the server is gone, and what it forked with it
            return -signal.SIGKILL, None
        return int(line[1]), float(line[2])

    def _next_line(self, timeout_s: float | None) -> list[str] | None:
        """Return the words of the next line; None at the end of the pipe, or after `timeout_s`."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            remaining_s = None if end is None else max(0.0, end - time.monotonic())
            has_news = self._news.poll(None if remaining_s is None else 1000 * remaining_s)
            if not has_news or not (data := os.read(self._status_fd, 4096)):
                return None
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode().split(" ")


class SpawnedProcess(Process):
    """A fresh interpreter."""

    def __init__(self, process: subprocess.Popen[bytes], run_id: str, rank: int) -> None:
        self.pid = process.pid
        self.end_fd = os.pidfd_open(process.pid) if hasattr(os, "pidfd_open") else None
        self._process = process
        self._mark = run_id, str(rank)

    def wait(self) -> tuple[int, float | None]:
        """Wait for its end, end its group; return its exit code and its peak memory in MB."""
        peak_mb = None
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        end_group(self.pid, all_processes)
        try:
            _, status, usage = os.wait4(self.pid, 0)
        except ChildProcessError:  # other code of this process collected it
            self._process.wait()
        else:
            self._process.returncode = os.waitstatus_to_exitcode(status)
            peak_mb = usage.ru_maxrss / 1024
        end_processes_of(*self._mark)
        return self._process.returncode, peak_mb


class RankProcess:
    """A rank of this host: its pipes and files, its process and its state.

    Attributes:
        rank: its place in the world.
        log: log of its output; None where another process keeps it.
        log_path: its path.
        stack_path: where it writes its stacks.
        report: our end of the pipe for messages.
        control: our end of the pipe for orders.
        result: a nameless file for its return value; both sides have it open.
        outputs: our ends of its stdout and stderr.
        theirs: the rank's ends, but for its streams: report, control, result.
        streams: its stdout and stderr, by number.
        process: its process, which is started inside the `with` block of the rank.
        is_running: whether it has not been collected yet.
        state: what it has reported, and how it ended.
    """

    def __init__(self, rank: int, job_dir: Path, *, keeps_log: bool = True) -> None:
        """Prepare for a rank; its process is started inside its `with` block."""
        self.rank = rank
        self.log_path = job_dir / f"rank-{rank}.log"
        self.log = RankLog(self.log_path) if keeps_log else None
        self.stack_path = job_dir / f"rank-{rank}.stack"
        opened: list[int] = []
        try:
            for _ in range(4):
                opened += os.pipe()
            self.result = nameless_file()
        except OSError as error:
            if self.log is not None:
                self.log.close()
            for fd in opened:
                os.close(fd)
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            raise PlatformError.because(
                f"the pipes of rank {rank}",
                f"{error.strerror}: this process may have {limit} of them",
                hint="ulimit -n 65536 in the shell, or fewer ranks",
            ) from error
        self.report, their_report, their_control, self.control, out, their_out, err, their_err = (
            opened
        )
        for fd in (their_out, their_err):
            if hasattr(fcntl, "F_SETPIPE_SZ"):
                with suppress(OSError):  # beyond what this user may have
                    fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self.outputs = out, err
        self.theirs = their_report, their_control, self.result
        self.streams = {1: their_out, 2: their_err}
        self.is_running = True
        self.state = RankState(rank=rank, host=socket.gethostname())
        self.process = Process()
        self._received = bytearray()
        self._ours = self.report, self.control, self.result, out, err

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the rank's ends of the pipes, and ours, too, if it did not start."""
        for fd in (*self.theirs[:2], *self.streams.values()):
            os.close(fd)
        if kind is not None:
            self.close()

    @property
    def pid(self) -> int:
        """Its process, which leads a group of its own."""
        return self.process.pid

    @property
    def fds(self) -> tuple[int, ...]:
        """All descriptors that this process has for the rank."""
        ends = () if self.process.end_fd is None else (self.process.end_fd,)
        logs = () if self.log is None else (self.log.fileno(),)
        return *self._ours, *logs, *ends

    def value(self) -> Parcel | None:
        """Return the packed return value, if there is one; it stays valid after `close`."""
        if self.state.state != "returned":
            return None
        return Parcel(os.dup(self.result), is_owner=True)

    def receive(self) -> list[Any] | None:
        """Return new messages, after an update of the state; None at the end of the pipe."""
        data = read_available(self.report)
        if data == b"":
            return None
        self._received += data or b""
        messages = take_messages(self._received)
        for news in messages:
            if isinstance(news, dict):
                self.state.take(news)
        return messages

    def collect(self) -> None:
        """Wait for the end of the process, end its group, and record its status."""
        self.state.exit_code, self.state.peak_mb = self.process.wait()
        self.is_running = False
        if not self.state.is_over:
            self.state.note("died")

    def order(self, **order: object) -> None:
        """Send the rank an order; orders are short enough for the pipe to take them whole.

        If the rank has ended, its exit status tells more than an error here could.
        """
        with suppress(OSError):
            os.write(self.control, json.dumps(order).encode() + b"\n")

    def signal(self, number: int) -> None:
        """Send a signal to the rank alone."""
        if self.is_running:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, number)

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to the process group of the rank."""
        if self.is_running:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def close(self) -> None:
        """Close all descriptors."""
        if self.log is not None:
            self.log.close()
        for fd in self._ours:
            os.close(fd)
        if self.process.end_fd is not None:
            os.close(self.process.end_fd)


def fork_ranks(
    variables_of: Sequence[Mapping[str, str]],
    *,
    payload_fd: int,
    job_dir: Path,
    stdin_rank: int | None,
    shared_fds: Sequence[int] = (),
    preload: Sequence[str] = (),
) -> list[RankProcess]:
    """Return ranks forked by the warm server; none if it cannot fork.

    `variables_of` tell each rank its place, `shared_fds` are files that all of them get, `preload`
    are modules that the server loads first.
    """
    main = "unisono.launch.pool.rank:live_as_forked"
    for _ in range(2):  # a server may have left, idle, at this very moment
        server = get_server()
        ranks: list[RankProcess] = []
        forked: list[ForkedProcess] = []
        is_good = False
        try:
            for variables in variables_of:
                with RankProcess(int(variables["RANK"]), job_dir) as rank:
                    fds = (payload_fd, *rank.theirs, *shared_fds)
                    streams = rank.streams | ({0: 0} if rank.rank == stdin_rank else {})
                    process = server.fork(main, variables, fds, streams=streams, preload=preload)
                    rank.process = process
                ranks.append(rank)
                forked.append(process)
            for process in forked:
                if process.confirm(ANSWER_S) is not None:
                    return []
            is_good = True
            return ranks
        except ServerGone:
            shutdown()
        finally:
            for rank in () if is_good else ranks:
                rank.close()  # one that was started ends when its pipe closes
    return []


def spawn_rank(
    rank: int,
    ranks: int,
    *,
    payload_fd: int,
    env: Mapping[str, str],
    job_dir: Path,
    keeps_log: bool = True,
    shared_fds: Sequence[int] = (),
    has_own_path: bool = False,
    kept_fds: Sequence[int] = (),
    stdin_fd: int = subprocess.DEVNULL,
) -> RankProcess:
    """Start a fresh interpreter as `rank`, leader of its own process group.

    With `has_own_path` the interpreter's own search path follows that of the payload. `shared_fds`
    are files that the rank shares with others; `kept_fds` are descriptors of this process that it
    inherits, too; `stdin_fd` is what it reads from.
    """
    with RankProcess(rank, job_dir, keeps_log=keeps_log) as process:
        inherited = (payload_fd, *process.theirs, *shared_fds)
        label = f"unisono rank {rank} of {ranks}"
        started = subprocess.Popen(
            interpreter_command(
                _RANK_BOOTSTRAP.format(adds=has_own_path), label, *map(str, inherited)
            ),
            stdin=stdin_fd,
            stdout=process.streams[1],
            stderr=process.streams[2],
            pass_fds=(*inherited, *kept_fds),
            env=env,
            process_group=0,
        )
        process.process = SpawnedProcess(started, env["UNISONO_RUN_ID"], rank)
    return process
