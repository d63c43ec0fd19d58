"""What the ranks of other hosts and whoever started them leave each other in the job's directory.

`Plan` is what both sides know from the start, as plain data in `job.json`; neither unpickles
anything of the user's. `Mailbox` is what they tell each other later: how a rank stands is in a file
that its agent writes, and orders go the same way. Each file has one writer and is replaced by a
rename; only private files of this user are read back.
"""

from __future__ import annotations

import json
import os
import platform as python_platform
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import unisono
from unisono.errors import PlatformError
from unisono.launch import job_files
from unisono.launch.job_files import check_ours, write_private
from unisono.launch.platform import Platform
from unisono.launch.pool.payload import Parcel
from unisono.launch.pool.protocol import Failed, RankState
from unisono.launch.pool.stacks import StackDumps, user_threads

PAYLOAD = "payload.pkl"
"""Search path, function, arguments: what each rank is started with."""
CANCEL = "cancel"
"""Is there once somebody has cancelled the job."""
INTERRUPT = "interrupt"
"""Is there once somebody has interrupted the launcher that waits for the job."""
REFUSED = "refused"
"""Is there if our own program has started no rank, with the reason."""
NOTICE = "notice"
"""Lines of that program which the user should see while ranks are being started."""
_TIMES = 3
"""How often an order is written until it is whole."""
_HOLE_S = 2.0
"""How long zeros in the orders may wait for their bytes."""


def own_versions() -> list[str]:
    """Return the versions that must agree: Python's first two numbers, and ours."""
    return [".".join(python_platform.python_version_tuple()[:2]), unisono.__version__]


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
    stop_signals: Sequence[str]
    """Signals that ask a rank to stop."""
    stack_signal: str
    """Signal at which a rank writes its stacks."""
    srun_args: Sequence[str]
    """More words for `srun`."""
    versions: Sequence[str] = field(default_factory=own_versions)
    """Python and unisono of whoever made the plan."""
    launcher: Sequence[Any] | None = None
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
            stop_signals=list(platform.stop_signals),
            srun_args=list(platform.srun_args),
            elastic=elastic,
        )

    @classmethod
    def read(cls, directory: Path) -> Plan:
        """Return the plan of the job in `directory`."""
        return cls(**job_files.read_state(directory)["plan"])

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


def pause_s(elapsed_s: float, ranks: int = 1) -> float:
    """Return how long to wait between two looks at files.

    Often at first, for the sake of short jobs, and in large worlds rarely.

    Example:
        >>> pause_s(1), pause_s(5), pause_s(3600), pause_s(3600, ranks=640)
        (0.02, 0.05, 0.1, 0.5)
    """
    return min(0.5, 0.1 * (1 + ranks // 64), max(0.02, elapsed_s / 100))


class Mailbox:
    """The files of one attempt: how its ranks stand, what they return, and orders for them.

    The orders are a file that grows by one JSON object a line. It is there before the ranks are,
    and grows in place: on a network file system that is seen much sooner than a new file. There two
    hosts that add at once may also tear a line, so whoever gives an order looks whether it is
    whole, and readers leave out what is none. Orders are `{"finish": true}`, `{"stop": "why"}`,
    `{"interrupt": seconds}`, `{"stack": true}` and `{"preempt": rank}`.
    """

    def __init__(self, directory: Path, attempt: int) -> None:
        self.dir = directory
        self.attempt = attempt
        self._orders = directory / f"orders-{attempt}"
        self._read = 0
        self._hole_since: float | None = None

    def write_state(self, state: RankState) -> None:
        """Tell others how a rank stands."""
        path = self.dir / f"rank-{state.rank}.state.json"
        write_private(path, json.dumps(state.as_json()).encode())

    def read_state(self, rank: int) -> RankState | None:
        """Return how a rank stands in this attempt; None if it has not said."""
        found = read_json(self.dir / f"rank-{rank}.state.json")
        if found is None or found["attempt"] != self.attempt:
            return None
        return RankState.from_json(found)

    def read_states(self, ranks: int) -> list[RankState]:
        """Return how all ranks stand; of those that have not said, nothing is known."""
        return [
            self.read_state(rank) or RankState(rank=rank, attempt=self.attempt)
            for rank in range(ranks)
        ]

    def write_failure(self, state: RankState, *, summary: str, traceback: str, lost: str) -> None:
        """Tell others that a rank has failed which cannot say so itself; see `Failed`."""
        failed = Failed(
            summary=summary, traceback=traceback, pickled=None, is_consequence=False, lost=lost
        )
        state.take({"state": "failed", "failed": failed})
        self.write_state(state)

    def write_value(self, rank: int, value: Parcel) -> None:
        """Leave what the function of a rank has returned."""
        value.save(self.dir / f"rank-{rank}.result")

    def read_value(self, rank: int) -> Parcel:
        """Return what the function of a rank has returned, from a private file of this user."""
        path = self.dir / f"rank-{rank}.result"
        check_ours(path)
        return Parcel.in_file(path)

    def ask_for_stacks(self, ranks: int) -> dict[int, str]:
        """Have the agents take stacks; return those that come in time."""
        dumps = StackDumps({rank: self.dir / f"rank-{rank}.stack" for rank in range(ranks)})
        try:
            self.order(stack=True)
        except OSError:
            return {}
        return {rank: user_threads(text) for rank, text in dumps.wait().items()}

    def open(self) -> None:
        """Make the file of the orders."""
        os.close(os.open(self._orders, os.O_WRONLY | os.O_CREAT, 0o600))

    def order(self, **order: Any) -> None:
        """Add an order."""
        line = json.dumps(order).encode()
        for _ in range(_TIMES):
            fd = os.open(self._orders, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
            try:
                os.write(fd, b"\n" + line + b"\n")  # apart from what may be torn before it
            finally:
                os.close(fd)
            if line in self._orders.read_bytes().splitlines():
                return

    def new_orders(self) -> Iterator[dict[str, Any]]:
        """Yield the orders that came since the last call."""
        try:
            check_ours(self._orders)
            with self._orders.open("rb") as file:
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
