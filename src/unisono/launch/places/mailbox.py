"""What the ranks of other hosts and whoever started them leave each other in the job's directory.

`Plan` is what both sides know from the start, as plain data in `job.json`; neither unpickles
anything of the user's. How a rank stands is in the files that its agent writes, and orders go the
same way. Each file has one writer and is replaced by a rename; only private files of this user are
read back.
"""

from __future__ import annotations

import json
import os
import platform as python_platform
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import unisono
from unisono.errors import PlatformError
from unisono.launch import job_files
from unisono.launch.job_files import check_ours, write_private
from unisono.launch.platform import Platform
from unisono.launch.pool import verdict
from unisono.launch.pool.payload import Parcel
from unisono.launch.pool.protocol import RankState

PAYLOAD = "payload.pkl"
"""Search path, function, arguments: what each rank is started with."""
CANCEL = "cancel"
"""Is there once somebody has cancelled the job."""
INTERRUPT = "interrupt"
"""Is there once somebody has interrupted the launcher that waits for the job."""
_TIMES = 3
"""How often an order is written until it is whole."""
_HOLE_S = 2.0
"""How long zeros in the orders may wait for their bytes."""


def own_versions() -> tuple[str, str]:
    """Return the versions that must agree: Python's first two numbers, and ours."""
    python = ".".join(python_platform.python_version_tuple()[:2])
    return python, unisono.__version__


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The plain facts of a job."""

    run_id: str
    """Word that tells this run from all others."""
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
    max_restarts: int
    """Attempts after a failure."""
    max_requeues: int
    """Attempts that the function itself may ask for."""
    stop_signals: tuple[str, ...]
    """Signals that ask a rank to stop."""
    stack_signal: str
    """Signal at which a rank writes its stacks."""
    words: tuple[str, ...] = ()
    """More words for `srun`."""
    versions: tuple[str, str] = field(default_factory=own_versions)
    """Python and unisono of whoever made the plan."""
    launcher: tuple[str, int, int] | None = None
    """Host, number and start of a process without which the ranks should not go on."""
    elastic: dict[str, Any] | None = None
    """For ranks that may die: `least`, `stall_s` and the `secret` of the job."""

    @classmethod
    def of(
        cls,
        platform: Platform,
        *,
        timeout_s: float | None,
        max_restarts: int,
        elastic: dict[str, Any] | None = None,
    ) -> Plan:
        """Return the plan of a checked platform."""
        return cls(
            ranks_per_node=platform.ranks_per_node,
            cpus_per_rank=platform.cpus_per_rank,
            start_timeout_s=platform.start_timeout_s,
            grace_s=platform.grace_s,
            interrupt_s=platform.interrupt_s,
            max_requeues=platform.max_requeues,
            stack_signal=platform.stack_signal,
            run_id=secrets.token_hex(8),
            ranks=platform.world_size,
            nodes=platform.n_nodes,
            env=dict(platform.env or {}),
            timeout_s=timeout_s,
            max_restarts=max_restarts,
            stop_signals=tuple(platform.stop_signals),
            words=tuple(platform.srun_args),
            elastic=elastic,
        )

    @classmethod
    def read(cls, directory: Path) -> Plan:
        """Return the plan of the job in `directory`."""
        entry: dict[str, Any] = job_files.read_state(directory)["plan"]
        tuples = {name: tuple(entry[name]) for name in ("stop_signals", "words", "versions")}
        launcher = entry["launcher"] and tuple(entry["launcher"])
        return cls(**{**entry, **tuples, "launcher": launcher})

    def as_json(self) -> dict[str, Any]:
        """Return what `read` needs."""
        return asdict(self)

    def check_versions(self) -> None:
        """Raise `PlatformError` if this interpreter would not understand the payload."""
        here = own_versions()
        if self.versions != here:
            raise PlatformError.because(
                f"a job of Python {self.versions[0]} with unisono {self.versions[1]}",
                f"on {python_platform.node()}: Python {here[0]} with unisono {here[1]}",
                None,
                "the same environment on all nodes, in a directory that they share",
            )


def write_state(directory: Path, state: RankState) -> None:
    """Tell others how a rank stands."""
    path = directory / f"rank-{state.rank}.state.json"
    write_private(path, json.dumps(state.as_json()).encode())


def read_state(directory: Path, rank: int, attempt: int) -> RankState | None:
    """Return how a rank stands in this attempt; None if it has not said."""
    found = read_json(directory / f"rank-{rank}.state.json")
    return RankState.from_json(found) if found and found["attempt"] == attempt else None


def read_states(directory: Path, ranks: int, attempt: int) -> list[RankState]:
    """Return how all ranks stand; of those that have not said, nothing is known."""
    return [
        read_state(directory, rank, attempt) or RankState(rank=rank, attempt=attempt)
        for rank in range(ranks)
    ]


def has_failure(directory: Path, attempt: int, *, but_consequences: bool = False) -> bool:
    """Whether any rank has failed or died in this attempt.

    `but_consequences` leaves out reports that only say that another rank went away.
    """
    for path in directory.glob("rank-*.state.json"):
        found = read_json(path)
        if found and found["attempt"] == attempt:
            state = RankState.from_json(found)
            if verdict.is_own(state) if but_consequences else state.is_bad:
                return True
    return False


def pause_s(elapsed_s: float, ranks: int = 1) -> float:
    """Return how long to wait between two looks at files.

    Often at first, for the sake of short jobs, and in large worlds rarely.

    Example:
        >>> pause_s(1), pause_s(5), pause_s(3600), pause_s(3600, ranks=640)
        (0.02, 0.05, 0.1, 0.5)
    """
    return min(0.5, 0.1 * (1 + ranks // 64), max(0.02, elapsed_s / 100))


def result_path(directory: Path, rank: int) -> Path:
    """Return where a rank leaves what its function returned."""
    return directory / f"rank-{rank}.result"


def read_value(directory: Path, rank: int) -> Parcel:
    """Return what the function of a rank returned, from a private file of this user."""
    path = result_path(directory, rank)
    check_ours(path)
    return Parcel.in_file(path)


class Orders:
    """The orders of an attempt: a file that grows by one JSON object a line.

    It is there before the ranks are, and grows in place: on a network file system that is seen
    much sooner than a new file. There two hosts that add at once may also tear a line, so whoever
    gives an order looks whether it is whole, and readers leave out what is none. Orders are
    `{"finish": true}`, `{"stop": "why"}`, `{"interrupt": seconds}` and `{"preempt": rank}`.
    """

    def __init__(self, directory: Path, attempt: int) -> None:
        self._path = directory / f"orders-{attempt}"
        self._read = 0
        self._hole_since: float | None = None

    def open(self) -> None:
        """Make the file."""
        os.close(os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600))

    def give(self, **order: Any) -> None:
        """Add an order."""
        line = json.dumps(order).encode()
        for _ in range(_TIMES):
            fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
            try:
                os.write(fd, b"\n" + line + b"\n")  # apart from what may be torn before it
            finally:
                os.close(fd)
            if line in self._path.read_bytes().splitlines():
                return

    def new(self) -> Iterator[dict[str, Any]]:
        """Yield the orders that came since the last call."""
        try:
            check_ours(self._path)
            with self._path.open("rb") as file:
                file.seek(self._read)
                data = file.read()
        except (OSError, ValueError):
            return
        whole = self._before_hole(data)
        whole = whole[: whole.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            with suppress(ValueError):  # torn
                order = json.loads(line)
                if isinstance(order, dict):
                    yield order

    def _before_hole(self, data: bytes) -> bytes:
        """Return what comes before zeros: a file may be longer for a moment than what has come."""
        if (hole := data.find(b"\0")) < 0:
            self._hole_since = None
            return data
        now = time.monotonic()
        self._hole_since = now if self._hole_since is None else self._hole_since
        return data[:hole] if now - self._hole_since < _HOLE_S else data.replace(b"\0", b"\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the content of a private file of ours; None if it is not there, or not yet whole."""
    try:
        check_ours(path)
    except PlatformError:
        if not path.exists() and not path.is_symlink():
            return None
        raise
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # replaced at this moment, on a network file system
        return None
    return found if isinstance(found, dict) else None
