"""Ranks on other hosts, which share a directory with their launcher and nothing else.

They are started by a program, as `srun` or `mpiexec`, which is told nothing and asked little: how
each rank stands is in the files that its agent writes, and orders go the same way. Each file has
one writer and is replaced by a rename; only private files of this user are read back.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from unisono.errors import PlatformError
from unisono.launch import job_files
from unisono.launch.job_files import check_ours, write_private
from unisono.launch.pool.monitor import size_of, text_from
from unisono.launch.pool.protocol import Failed
from unisono.launch.stacks import user_threads

if TYPE_CHECKING:
    from unisono.launch.places.remote import Plan

PAYLOAD = "payload.pkl"
"""Search path, function, arguments: what each rank is started with."""
CANCEL = "cancel"
"""Is there once somebody has cancelled the job."""
INTERRUPT = "interrupt"
"""Is there once somebody has interrupted the launcher that waits for the job."""
GOOD = ("returned", "requeued")
"""States of a rank whose function came to a good end."""
BAD = ("failed", "died")
"""States of a rank that ends the others."""
_TIMES = 3
"""How often an order is written until it is whole."""
_HOLE_S = 2.0
"""How long zeros in the orders may wait for their bytes."""
POLL_S = 0.1
"""Seconds between two looks at stacks that were asked for."""
COLLECT_S = 0.25
"""After the first bad news: time in which others may report, before all are stopped."""
LEAVE_S = 15.0
"""Longest time from an order to the end of the program."""


@dataclass(kw_only=True)
class RankState:
    """What a rank's agent knows of it."""

    rank: int
    """Its place in the world."""
    attempt: int
    """Which attempt this is about."""
    host: str
    """Where it runs."""
    node: str = ""
    """What the scheduler calls that host."""
    state: str = "starting"
    """`starting`, `running`, `ready`, `returned`, `requeued`, `failed`, `died`, `stopped`."""
    pid: int = 0
    """Its process."""
    pid_start: int | None = None
    """When that process started, to tell it from a later one of the same number."""
    exit_code: int | None = None
    """How it ended, negative for a signal; None while it runs, or if it was stopped."""
    peak_mb: float | None = None
    """Largest memory it used."""
    stack: str = ""
    """Where it stood when it was stopped."""
    standing: dict[str, Any] | None = None
    """Where it stood among collectives then, as `messages.Standing`."""
    warning: str = ""
    """What was strange about its end, although its result counts."""
    finishing_s: float = 0.0
    """How long it may take to finish a save before it ends."""
    at: dict[str, float] = field(default_factory=dict)
    """When it came into each state, by the clock of its host."""


def write_state(directory: Path, state: RankState) -> None:
    """Tell others how a rank stands."""
    path = directory / f"rank-{state.rank}.state.json"
    write_private(path, json.dumps(asdict(state)).encode())


def read_state(directory: Path, rank: int, attempt: int) -> RankState | None:
    """Return how a rank stands in this attempt; None if it has not said."""
    found = read_json(directory / f"rank-{rank}.state.json")
    return RankState(**found) if found and found["attempt"] == attempt else None


def read_states(directory: Path, ranks: int, attempt: int) -> list[RankState | None]:
    """Return how all ranks stand."""
    return [read_state(directory, rank, attempt) for rank in range(ranks)]


def write_error(directory: Path, rank: int, attempt: int, failed: Failed) -> None:
    """Keep the report of a rank that failed."""
    pickled = base64.b64encode(failed.pickled).decode() if failed.pickled is not None else None
    entry = {**asdict(failed), "pickled": pickled, "attempt": attempt}
    write_private(directory / f"rank-{rank}.error.json", json.dumps(entry).encode())


def read_error(directory: Path, rank: int, attempt: int) -> Failed | None:
    """Return the report of a rank that failed in this attempt."""
    found = read_json(directory / f"rank-{rank}.error.json")
    if not found or found.pop("attempt") != attempt:
        return None
    if found["pickled"] is not None:
        found["pickled"] = base64.b64decode(found["pickled"])
    return Failed(**found)


def has_failure(directory: Path, attempt: int, *, but_consequences: bool = False) -> bool:
    """Whether any rank has failed or died in this attempt.

    `but_consequences` leaves out reports that only say that another rank went away.
    """
    for path in directory.glob("rank-*.state.json"):
        found = read_json(path)
        if found and found["attempt"] == attempt and found["state"] in BAD:
            failed = read_error(directory, found["rank"], attempt) if but_consequences else None
            if failed is None or not failed.is_consequence:
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


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How an attempt ended."""

    state: Literal["done", "requeued", "failed", "timeout", "cancelled", "lost"]
    """In one word; `lost`: the program ended, and not all ranks have told how they did."""
    attempt: int
    """Which attempt."""
    was_ready: bool
    """Whether all ranks have been ready."""
    start_s: float
    """Seconds until the last rank was ready."""
    wall_s: float
    """Seconds from then to the last return."""
    exit_code: int | None
    """That of the program."""
    deadline: str = ""
    """Which deadline passed."""

    def as_json(self) -> dict[str, object]:
        """Return the same as plain data."""
        return asdict(self)


class RemoteSupervisor:
    """Runs one attempt. `run` is for one thread; `stacks` and `stop` for any."""

    def __init__(
        self,
        directory: Path,
        plan: Plan,
        attempt: int,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        on_tick: Callable[[], None] = lambda: None,
    ) -> None:
        """Take what is needed.

        Args:
            directory: of the job.
            plan: its plain facts.
            attempt: number of this attempt.
            command: starts one agent for each rank, and ends when they have.
            env: variables of the program; None are those of this process.
            on_tick: called every round; what it raises ends all ranks and passes.
        """
        self._dir = directory
        self._plan = plan
        self._attempt = attempt
        self._command = list(command)
        self._env = env
        self._on_tick = on_tick
        self._orders = Orders(directory, attempt)
        self._states: list[RankState | None] = [None] * plan.ranks
        self._began = time.monotonic()
        self._ready_at: float | None = None
        self._returned_at: float | None = None
        self._bad_since: float | None = None
        self._interrupted_until: float | None = None
        self._stopped_at: float | None = None
        self._stop_reason = ""
        self._deadline = ""

    @property
    def was_ready(self) -> bool:
        """Whether all ranks have been ready."""
        return self._ready_at is not None

    @property
    def output_path(self) -> Path:
        """Where the output of the program itself goes."""
        return self._dir / "starter.log"

    def stop(self, reason: str) -> None:
        """Order all ranks to stop. From any thread; only the first order counts."""
        if self._stopped_at is None:
            self._stopped_at, self._stop_reason = time.monotonic(), reason
            self._orders.give(stop=reason)

    def interrupt(self) -> None:
        """Ask all ranks to save and end, as Ctrl-C does; stop them where they take too long."""
        if self._interrupted_until is None:
            self._interrupted_until = time.monotonic() + self._plan.interrupt_s
            self._orders.give(interrupt=self._plan.interrupt_s)

    @property
    def is_interrupted(self) -> bool:
        """Whether the ranks were asked to end."""
        return self._interrupted_until is not None

    def stacks(self, timeout_s: float = 2.0) -> dict[int, str]:
        """Return where the ranks stand that answer in time. From any thread."""
        return ask_for_stacks(self._dir, self._plan.ranks, self._attempt, timeout_s)

    def run(self) -> Ending:
        """Start the program, and stay until it has ended."""
        self._orders.open()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        output = os.open(self.output_path, flags, 0o600)
        try:
            # A session of its own: signals to our process group are for the ranks alone, and
            # srun would take them as the end.
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=self._env,
            )
        finally:
            os.close(output)
        try:
            self._watch(process)
        except BaseException:
            with suppress(OSError):
                self.stop("the launcher was interrupted")
            if self.is_interrupted:  # this is the second Ctrl-C
                self._end_ranks_here()
            for limit_s in (lambda: self._plan.grace_s + 2.0, self._finishing_s):
                with suppress(subprocess.TimeoutExpired):
                    process.wait(limit_s())
            raise
        finally:
            _end(process)
            self._end_ranks_here()
        return self._ending(process.returncode)

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        while process.poll() is None:
            self._on_tick()
            self._look()
            if self._stopped_at is not None:
                late_s = time.monotonic() - self._stopped_at - self._plan.grace_s - LEAVE_S
                if late_s > 0 and late_s > self._finishing_s():
                    return
            with suppress(subprocess.TimeoutExpired):
                elapsed_s = time.monotonic() - self._began
                process.wait(pause_s(elapsed_s, self._plan.ranks))
        self._look()

    def _look(self) -> None:
        """Read how ranks stand, and give the orders that follow from it."""
        for rank, known in enumerate(self._states):
            if known is None or known.state not in (*GOOD, *BAD):
                self._states[rank] = read_state(self._dir, rank, self._attempt) or known
        states = [state for state in self._states if state is not None]
        now = time.monotonic()
        if self._ready_at is None and all(s is not None and "ready" in s.at for s in self._states):
            self._ready_at = now
            entry = {"start_s": now - self._began}
            path = self._dir / f"ready-{self._attempt}.json"
            write_private(path, json.dumps(entry).encode())
        if self._stopped_at is not None or self._returned_at is not None:
            return
        if (self._dir / INTERRUPT).exists():
            self.interrupt()
        if self._have_all(GOOD):
            self._returned_at = now
            self._orders.give(finish=True)
        elif self._interrupted_until is not None:
            is_over = now > self._interrupted_until or self._have_all((*GOOD, *BAD, "stopped"))
            if is_over or (self._dir / CANCEL).exists():
                self.stop("interrupted")
        elif any(state.state in BAD for state in states):
            # By our own clock: that of the rank's host may be minutes ahead.
            self._bad_since = now if self._bad_since is None else self._bad_since
            if now - self._bad_since > COLLECT_S:
                self.stop("another rank failed")
        elif (self._dir / CANCEL).exists():
            self.stop("cancelled")
        else:
            self._check_deadline(now)

    def _finishing_s(self) -> float:
        """Return how long ranks may take that finish a save before they end."""
        states = read_states(self._dir, self._plan.ranks, self._attempt)
        return max((state.finishing_s for state in states if state is not None), default=0.0)

    def _have_all(self, words: Sequence[str]) -> bool:
        return all(state is not None and state.state in words for state in self._states)

    def _check_deadline(self, now: float) -> None:
        plan = self._plan
        if self._ready_at is None:
            if now > self._began + plan.start_timeout_s:
                self._deadline = f"not ready {plan.start_timeout_s:g} s after the start"
        elif plan.timeout_s is not None and now > self._ready_at + plan.timeout_s:
            self._deadline = f"not done within timeout_s={plan.timeout_s:g}"
        if self._deadline:
            self.stop("deadline")

    def _ending(self, exit_code: int | None) -> Ending:
        words = [state.state if state else None for state in self._states]
        if self._deadline:  # who failed then was stopped, or saw another one go
            state = "timeout"
        elif self.is_interrupted:
            state = "cancelled"
        elif any(word in BAD for word in words):
            state = "failed"
        elif self._have_all(GOOD):
            state = "requeued" if "requeued" in words else "done"
        elif self._stop_reason == "cancelled" or (self._dir / CANCEL).exists():
            state = "cancelled"
        else:
            state = "lost"
        return Ending(
            state=state,
            attempt=self._attempt,
            was_ready=self.was_ready,
            start_s=(self._ready_at or time.monotonic()) - self._began,
            wall_s=max(0.0, self._last(*GOOD) - self._last("ready")),
            exit_code=exit_code,
            deadline=self._deadline,
        )

    def _last(self, *words: str) -> float:
        """Return when the last rank came into one of these states, by the clock of its host."""
        times = [
            s.at[word] for s in self._states if s is not None for word in words if word in s.at
        ]
        return max(times, default=0.0)

    def _end_ranks_here(self) -> None:
        """Kill ranks of this host that outlived the program, if they still are what they were."""
        for rank in range(self._plan.ranks):
            state = read_state(self._dir, rank, self._attempt)
            if state is None or state.host != socket.gethostname() or not state.pid:
                continue
            if job_files.process_start(state.pid) == state.pid_start:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(state.pid, signal.SIGKILL)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the program, which should have ended by itself, and all that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(2.0)


def ask_for_stacks(
    directory: Path, ranks: int, attempt: int, timeout_s: float = 2.0
) -> dict[int, str]:
    """Have the agents of an attempt take stacks; return those that come in time."""
    paths = {rank: directory / f"rank-{rank}.stack" for rank in range(ranks)}
    begin = {rank: size_of(path) for rank, path in paths.items()}
    try:
        Orders(directory, attempt).give(stack=True)
    except OSError:
        return {}
    end, sizes = time.monotonic() + timeout_s, begin
    while time.monotonic() < end:
        time.sleep(POLL_S)
        before, sizes = sizes, {rank: size_of(path) for rank, path in paths.items()}
        if sizes == before and all(sizes[rank] > begin[rank] for rank in paths):
            break
    dumps = {rank: text_from(path, begin[rank]) for rank, path in paths.items()}
    return {rank: user_threads(text) for rank, text in dumps.items() if text}
