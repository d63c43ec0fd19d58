"""The protocol between launcher and rank: the job, news of the rank, orders of the launcher.

All ranks read the job from one file. On its own pipe a rank sends pickled changes of its
`RankState` and, for others, `address`: where rank 0 hosts the store. Orders are JSON objects, one a
line. Both pipes are inherited by exactly one process, so only data of our own children is ever
unpickled.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import platform as python_platform
import secrets
import signal
import struct
import sys
import sysconfig
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import unisono
from unisono.launch.pool.payload import ROOM, Parcel

if TYPE_CHECKING:
    from unisono.launch.platform import Platform
    from unisono.launch.pool.surroundings import Surroundings

AWAY_S = 3.0
"""How long the connection to members of an elastic training may be away, unless the user says."""
_LENGTH = struct.Struct("<Q")
_CHUNK = 1 << 20
_sending = threading.RLock()
"""Keeps messages of several threads of a rank apart."""


def own_versions() -> list[str]:
    """Return the versions that must agree: Python's first two numbers, and ours."""
    return [".".join(python_platform.python_version_tuple()[:2]), unisono.__version__]


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What is fixed about a run before its first rank starts."""

    run_id: str
    """Identifies the run."""
    ranks: int
    """Size of the world."""
    ranks_per_node: int
    """How many of them share a node."""
    nodes: int
    """Number of nodes."""
    cpus_per_rank: int
    """CPUs, and threads, of each rank."""
    env: dict[str, str]
    """Variables for the ranks."""
    start_timeout_s: float
    """Deadline of the start."""
    timeout_s: float | None
    """Deadline of the function."""
    grace_s: float
    """Time between asking a rank to stop and killing it."""
    interrupt_s: float
    """Time that ranks have to save and end after the first Ctrl-C."""
    lost_after_s: float
    """How long a connection to an agent may be away before its rank is given up."""
    max_restarts: int
    """Attempts after a failure."""
    max_requeues: int
    """Attempts that the function may ask for."""
    stop_signals: Sequence[str]
    """Signals that ask a rank to stop."""
    stack_signal: str
    """Signal at which a rank writes its stacks."""
    srun_args: Sequence[str]
    """More words for `srun`."""
    versions: Sequence[str] = field(default_factory=own_versions)
    """Python and unisono of the process that made the plan."""
    elastic: dict[str, Any] | None = None
    """For ranks that may die: `least`, the fewest members, and `stall_s`, how long these may wait
    for another one."""

    @classmethod
    def of(
        cls,
        platform: Platform,
        *,
        timeout_s: float | None,
        max_restarts: int,
        elastic: dict[str, Any] | None = None,
    ) -> RunPlan:
        """Return the plan of a checked platform."""
        # Others do the work of a member that is away: there is no need to wait for long.
        is_patient = elastic is None or platform.is_explicit("lost_after_s")
        same = ("ranks_per_node", "cpus_per_rank", "start_timeout_s", "grace_s", "interrupt_s")
        same += ("max_requeues", "stack_signal", "stop_signals", "srun_args")
        return cls(
            **{name: getattr(platform, name) for name in same},
            lost_after_s=platform.lost_after_s if is_patient else AWAY_S,
            run_id=secrets.token_hex(8),
            ranks=platform.world_size,
            nodes=platform.n_nodes,
            env=dict(platform.env or {}),
            timeout_s=timeout_s,
            max_restarts=max_restarts,
            elastic=elastic,
        )


@dataclass(frozen=True, kw_only=True)
class RankJob:
    """What all ranks of a run get."""

    argv: list[str]
    """The launcher's `sys.argv`."""
    call: Parcel
    """Function and arguments; empty while the job is sent, for they travel beside it."""
    platform: Platform
    """The platform."""
    setting: Surroundings
    """The launcher's surroundings."""
    upon_finish: bytes | None = None
    """Function, pickled, that rank 0 calls when all have returned; else the launcher calls it."""
    is_script: bool = False
    """Whether the function is a whole script, which may initialise torch.distributed."""
    preload: Sequence[str] = ()
    """Modules that the warm server loads before it forks ranks."""
    secret: bytes = field(default_factory=partial(secrets.token_bytes, 32), repr=False)
    """With it ranks sign what they leave each other (`comm/seal.py`)."""


def payload_file(job: RankJob, search_path: Sequence[str] | None = None) -> int:
    """Return a descriptor of a nameless file with the whole job; it is valid as long as the job.

    A file and not a pipe: all ranks read the same one, and none can block the launcher. It begins
    with the offset of what follows the call: the search path (default: that of this process), and
    the rest of the job.
    """
    fd, end = job.call.fd, job.call.end
    body = pickle.dumps(replace(job, call=Parcel(-1)), protocol=pickle.HIGHEST_PROTOCOL)
    packed = b"\0".join(map(os.fsencode, sys.path if search_path is None else search_path))
    os.pwrite(fd, end.to_bytes(8, "little"), 0)
    os.pwrite(fd, len(packed).to_bytes(8, "little") + packed + body, end)
    os.ftruncate(fd, end + 8 + len(packed) + len(body))
    return fd


def read_payload(payload_fd: int) -> tuple[list[str], RankJob]:
    """Return the launcher's search path and the job, whose call is not unpickled yet."""
    end = int.from_bytes(os.pread(payload_fd, 8, 0), "little")
    length = int.from_bytes(os.pread(payload_fd, 8, end), "little")
    search_path = os.fsdecode(os.pread(payload_fd, length, end + 8)).split("\0")
    body = os.pread(payload_fd, os.fstat(payload_fd).st_size, end + 8 + length)
    job: RankJob = pickle.loads(body)
    return search_path, replace(job, call=Parcel(payload_fd, ROOM, is_owner=True))


def write_payload(job: RankJob, path: Path) -> None:
    """Write the job to a private file, for ranks that share no descriptors.

    Each host has its own Python, perhaps elsewhere: its directories are left out of the path.
    """
    paths = sysconfig.get_paths()
    of_python = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    search_path = [
        entry
        for entry in sys.path
        if not entry.endswith(".zip") and not any(Path(entry).is_relative_to(p) for p in of_python)
    ]
    Parcel(payload_file(job, search_path)).save(path)


@dataclass(frozen=True, kw_only=True)
class Failed:
    """The report of a rank whose function, or whose start, raised."""

    summary: str
    """Type and text of the exception in one line."""
    traceback: str
    """Formatted traceback of the rank, without our own frames."""
    pickled: bytes | None
    """The exception itself, if it survives pickling."""
    is_consequence: bool
    """Whether it only says that another rank ended or did not come."""
    exit_code: int | None = None
    """Code of a `SystemExit`."""
    site: str = ""
    """Innermost line of the user's code, as `file.py:12 in step`."""
    is_mismatch: bool = False
    """Whether it says that ranks make different calls: then each report is a part of the cause."""
    lost: str = ""
    """What to check, where the rank is lost and its supervisor reports it."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """The latest collective of a rank, as it answers the launcher."""

    call: str
    """Its latest collective, and whether that is over."""
    group: str
    """Group of that call, as all its ranks name it."""
    number: int
    """How many collectives this rank has begun in it."""


_TOLD = frozenset(("failed", "standing", "warning", "finishing_s"))
"""What a rank reports beside its state."""
GOOD = ("returned", "requeued")
"""States of a rank whose function ended well."""
BAD = ("failed", "died")
"""States of a rank that ends the others."""


@dataclass(kw_only=True)
class RankState:
    """The state of one rank: what it has reported, where it was stopped, and how it ended."""

    rank: int
    """Its place in the world."""
    attempt: int = 0
    """Number of the attempt."""
    host: str = ""
    """Where it runs."""
    node: str = ""
    """Name of that host for the scheduler."""
    state: str = "starting"
    """`starting`, `running`, `ready`, `returned`, `requeued`, `failed`, `died`, `stopped`."""
    pid: int = 0
    """Its process."""
    pid_start: int | None = None
    """When that process started, to tell it from a later one with the same id."""
    failed: Failed | None = None
    """Its report of a failure, if it made one."""
    exit_code: int | None = None
    """How its process ended, negative for a signal; None while it runs."""
    peak_mb: float | None = None
    """Largest memory it used, once it ended."""
    stack: str = ""
    """Its stacks when it was stopped."""
    standing: Standing | None = None
    """Its latest collective then."""
    warning: str = ""
    """What went wrong at its end, although its result counts."""
    finishing_s: float = 0.0
    """Time that it may take to finish a save before it ends."""
    at: dict[str, float] = field(default_factory=dict)
    """When it entered each state, by the clock of its host."""

    @property
    def is_ready(self) -> bool:
        """Whether it has been ready to call the function at some time."""
        return "ready" in self.at

    @property
    def is_good(self) -> bool:
        """Whether its function returned, or asked to be requeued."""
        return self.state in GOOD

    @property
    def is_bad(self) -> bool:
        """Whether it failed, or ended without a result."""
        return self.state in BAD

    @property
    def is_over(self) -> bool:
        """Whether it has ended, or was stopped."""
        return self.state in (*GOOD, *BAD, "stopped")

    @property
    def place(self) -> str:
        """Its host, as users know it."""
        return self.node or self.host or "a host unknown"

    def note(self, state: str) -> None:
        """Enter a state."""
        self.state = state
        self.at.setdefault(state, time.time())

    def take(self, news: Mapping[str, Any]) -> None:
        """Apply a report of the rank; a final state does not change any more."""
        if "state" in news and not self.is_over:
            self.note(news["state"])
        for name in news.keys() & _TOLD:
            setattr(self, name, news[name])


def _unlock_after_fork() -> None:
    global _sending
    _sending = threading.RLock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_unlock_after_fork)


def send_message(fd: int, message: object) -> None:
    """Write one message; block until the launcher has read it."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    with _sending:
        for part in (_LENGTH.pack(len(body)), body):
            view = memoryview(part)
            while view:
                view = view[os.write(fd, view) :]


def tell(fd: int, **news: Any) -> None:
    """Send news of this rank to the launcher; block until it has read them."""
    send_message(fd, news)


def take_messages(received: bytearray) -> list[Any]:
    """Remove and return the complete messages of `received`; the rest stays."""
    messages: list[Any] = []
    while len(received) >= _LENGTH.size:
        end = _LENGTH.size + _LENGTH.unpack_from(received)[0]
        if len(received) < end:
            break
        messages.append(pickle.loads(received[_LENGTH.size : end]))
        del received[:end]
    return messages


def read_available(fd: int) -> bytes | None:
    """Read from a descriptor that does not block: b"" at the end, None without data."""
    try:
        return os.read(fd, _CHUNK)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def drop_descriptor(fd: int) -> None:
    """Close a pipe of the parent process; its descriptor refers to /dev/null from now on."""
    with contextlib.suppress(OSError):
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, fd, inheritable=False)
        os.close(null)


def kill_own_group() -> None:
    """Kill this process and all of its process group, which is ours alone."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
