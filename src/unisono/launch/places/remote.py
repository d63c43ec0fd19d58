"""Ranks that a program such as `srun` or `mpiexec` starts, on this host and others.

The program is told nothing and asked little: how the ranks stand, and what became of them, is read
from the files of the job (`mailbox.py`), and orders go the same way.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from unisono.errors import RankFailed, RankTimeout, name_ranks
from unisono.launch import job_files
from unisono.launch.console import warn
from unisono.launch.job_files import write_private
from unisono.launch.logs import tail
from unisono.launch.places import mailbox
from unisono.launch.places.mailbox import (
    BAD,
    CANCEL,
    GOOD,
    INTERRUPT,
    Orders,
    Plan,
    RankState,
    pause_s,
    read_state,
    read_states,
)
from unisono.launch.pool import verdict
from unisono.launch.pool.monitor import Outcome
from unisono.launch.pool.payload import Parcel
from unisono.launch.pool.protocol import Standing
from unisono.launch.pool.stacks import StackDumps, crash_in, user_threads

COLLECT_S = 0.25
"""After the first bad news: time in which others may report, before all are stopped."""
LEAVE_S = 15.0
"""Longest time from an order to the end of the program."""


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
        self._questions: deque[Callable[[], None]] = deque()
        self._states: list[RankState | None] = [None] * plan.ranks
        self._began = time.monotonic()
        self._ready_at: float | None = None
        self._returned_at: float | None = None
        self._bad_since: float | None = None
        self._interrupted_until: float | None = None
        self._stopped_at: float | None = None
        self._stop_reason = ""
        self._deadline = ""
        self.mistake = ""
        """What the program as a whole does that cannot be right."""

    @property
    def was_ready(self) -> bool:
        """Whether all ranks have been ready."""
        return self._ready_at is not None

    @property
    def output_path(self) -> Path:
        """Where the output of the program itself goes."""
        return self._dir / "starter.log"

    def ask(self, question: Callable[[], None]) -> None:
        """Have `question` called by the thread that runs the attempt, soon. From any thread."""
        self._questions.append(question)

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
            while self._questions:
                self._questions.popleft()()
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
        if self._is_good():
            self._returned_at = now
            self._orders.give(finish=True)
        elif self._interrupted_until is not None:
            is_over = now > self._interrupted_until or self._have_all((*GOOD, *BAD, "stopped"))
            if is_over or (self._dir / CANCEL).exists():
                self.stop("interrupted")
        elif self._is_bad():
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

    def _is_good(self) -> bool:
        """Whether the ranks have come to a good end."""
        return self._have_all(GOOD)

    def _is_bad(self) -> bool:
        """Whether something has happened to a rank that ends all of them."""
        return any(state is not None and state.state in BAD for state in self._states)

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
        elif self._is_bad():
            state = "failed"
        elif self._is_good():
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
    dumps = StackDumps({rank: directory / f"rank-{rank}.stack" for rank in range(ranks)})
    try:
        Orders(directory, attempt).give(stack=True)
    except OSError:
        return {}
    return {rank: user_threads(text) for rank, text in dumps.wait(timeout_s).items()}


def read_outcome(directory: Path, ranks: int, ending: Ending) -> Outcome:
    """Return what all ranks of a successful attempt returned, from private files of this user.

    Warns of ranks that returned, and then did not end as they should.
    """
    found = dict(enumerate(mailbox.read_states(directory, ranks, ending.attempt)))
    # Of an elastic job, some may have died.
    states = {rank: state for rank, state in found.items() if not state or state.state in GOOD}
    values: list[Parcel] = []
    for rank in states if ending.state == "done" else ():
        path = mailbox.result_path(directory, rank)
        job_files.check_ours(path)
        values.append(Parcel.in_file(path))
    for state in states.values():
        if state is not None and (state.warning or state.exit_code):
            how = state.warning or verdict.ending(state.exit_code)
            warn(f"rank {state.rank} returned its result, then {how}")
    return Outcome(
        values=values,
        is_requeued=ending.state == "requeued",
        hosts=[state.node or state.host if state else "" for state in states.values()],
        start_s=ending.start_s,
        wall_s=ending.wall_s,
    )


def read_error(directory: Path, ranks: int, ending: Ending) -> RankFailed | RankTimeout:
    """Return the error of an attempt that did not succeed."""
    fates = read_fates(directory, ranks, ending.attempt)
    states = mailbox.read_states(directory, ranks, ending.attempt)
    stacks = {s.rank: user_threads(s.stack) for s in states if s is not None and s.stack}
    if ending.state == "failed":
        return verdict.failure(fates, stacks=stacks, job_dir=str(directory), attempt=ending.attempt)
    good = {state.rank for state in states if state is not None and state.state in GOOD}
    late = [rank for rank in range(ranks) if rank not in good]
    if ending.state == "timeout":
        standings = {s.rank: Standing(**s.standing) for s in states if s and s.standing}
        if not ending.was_ready:
            waiting = {s.rank for s in states if s is not None and "ready" in s.at}
            late = [rank for rank in late if rank not in waiting] or late
        return verdict.timeout(
            fates,
            what=f"{name_ranks(late)} of {ranks} {ending.deadline}",
            stacks=stacks,
            suspect=verdict.suspect(late, standings, stacks),
            last_collective={rank: standing.call for rank, standing in standings.items()},
            job_dir=str(directory),
        )
    output = tail(directory / "starter.log").splitlines()[-verdict.LOG_LINES :]
    code = "" if ending.exit_code is None else f" (code {ending.exit_code})"
    lines = [f"{name_ranks(late)} of {ranks} ended without a word{code}"]
    lines += [f"  {line}" for line in output]
    lines.append(f"HINT: the host may have gone down; logs are in {directory}")
    return RankFailed(
        "\n".join(lines),
        rank=late[0] if late else None,
        host=fates[late[0]].host if late else None,
        exit_code=ending.exit_code,
        job_dir=str(directory),
        attempt=ending.attempt,
    )


def own_failure(directory: Path, ranks: int, attempt: int) -> RankFailed | RankTimeout | None:
    """Return the error of an attempt that was interrupted, where a rank did more than end."""
    fates = read_fates(directory, ranks, attempt)
    if not any(fate.is_own for fate in fates):
        return None
    return verdict.failure(fates, stacks={}, job_dir=str(directory), attempt=attempt)


def headline(directory: Path, ranks: int, ending: Ending) -> str:
    """Return the first line of the error of an attempt, without unpickling anything."""
    if ending.state == "failed":
        fates = read_fates(directory, ranks, ending.attempt)
        plain = [
            replace(fate, failed=replace(fate.failed, pickled=None)) if fate.failed else fate
            for fate in fates
        ]
        return str(verdict.failure(plain, stacks={})).splitlines()[0]
    return str(read_error(directory, ranks, ending)).splitlines()[0]


def read_fates(directory: Path, ranks: int, attempt: int) -> list[verdict.Fate]:
    """Return what is known of each rank of an attempt."""
    fates: list[verdict.Fate] = []
    for rank in range(ranks):
        state = mailbox.read_state(directory, rank, attempt)
        failed = mailbox.read_error(directory, rank, attempt)
        text = tail(directory / f"rank-{rank}.log")
        fates.append(
            verdict.Fate(
                rank=rank,
                host=(state.node or state.host) if state else "a host unknown",
                failed=failed,
                failed_at=state.at.get("failed", 0.0) if state else 0.0,
                exit_code=state.exit_code if state and state.state == "died" else None,
                peak_mb=state.peak_mb if state else None,
                crash=crash_in(directory / f"rank-{rank}.stack"),
                log_tail="\n".join(text.splitlines()[-verdict.LOG_LINES :]),
            )
        )
    return fates
