"""Ranks that a program such as `srun` or `mpiexec` starts, on this host and others.

The program starts an agent for each rank. It is told nothing and asked little: how the ranks stand,
and what became of them, is read from the files of the job (`mailbox.py`), and orders go the same
way. `mpiexec` and `srun` are such programs, and so are ours for ssh and Ray.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from unisono.errors import PlatformError
from unisono.launch import job_files
from unisono.launch.console import STDIN_VARIABLE, Console, stdin_rank
from unisono.launch.logs import LogFollower, text_from
from unisono.launch.places import mailbox, mirror
from unisono.launch.places.mailbox import Orders, Plan, read_states
from unisono.launch.pool.payload import Parcel
from unisono.launch.pool.protocol import Job, RankState, write_payload
from unisono.launch.pool.stacks import StackDumps, user_threads
from unisono.launch.pool.verdict import STARTER_LOG
from unisono.launch.supervisor import Ranks

LEAVE_S = 15.0
"""Longest time from an order to the end of the program."""


class ProgramRanks(Ranks):
    """The ranks of one attempt that a program starts.

    Args:
        directory: of the job.
        plan: its plain facts.
        attempt: number of the attempt.
        command: starts one agent for each rank, and ends when they have.
        env: variables of the program; None are those of this process.
        on_look: called every round; what it raises ends all ranks and passes.
    """

    def __init__(
        self,
        directory: Path,
        plan: Plan,
        attempt: int,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        on_look: Callable[[], None] = lambda: None,
    ) -> None:
        self._dir = directory
        self._plan = plan
        self._attempt = attempt
        self._command = list(command)
        self._env = env
        self._on_look = on_look
        self._orders = Orders(directory, attempt)
        self.states = [RankState(rank=rank, attempt=attempt) for rank in range(plan.ranks)]
        self._began = time.monotonic()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the program."""
        self._orders.open()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        output = os.open(self._dir / STARTER_LOG, flags, 0o600)
        try:
            # A session of its own: signals to our process group are for the ranks alone, and
            # srun would take them as the end.
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=self._env,
            )
        finally:
            os.close(output)

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for news at most so long, and take all that has come; say whether there was any."""
        pause = mailbox.pause_s(time.monotonic() - self._began, self._plan.ranks)
        self._wait_for_program(pause if timeout_s is None else min(pause, timeout_s))
        self._on_look()
        before = list(self.states)
        for rank, known in enumerate(before):
            if not known.is_good and not known.is_bad:
                found = mailbox.read_state(self._dir, rank, self._attempt)
                self.states[rank] = found or known
        return self.states != before

    def wake(self) -> None:
        """Do nothing: `wait` returns soon by itself."""

    def interrupt(self, seconds: float) -> None:
        """Ask all to save and end within so many seconds."""
        self._orders.give(interrupt=seconds)

    def finish(self) -> None:
        """Let all leave, which have returned, and stay until the program has ended."""
        self._orders.give(finish=True)
        self._wait_for_end()

    def stop(self, reason: str) -> None:
        """Have all agents note where their ranks stand, and end them."""
        self._orders.give(stop=reason)
        self._wait_for_end()

    def stacks(self) -> dict[int, str]:
        """Return where those stand that answer."""
        return ask_for_stacks(self._dir, self._plan.ranks, self._attempt)

    def value(self, rank: int) -> Parcel:
        """Return what a rank has returned."""
        return mailbox.read_value(self._dir, rank)

    def close(self, *, at_once: bool | None) -> None:
        """Leave neither the program nor a rank of this host behind."""
        try:
            if at_once is not None:
                with suppress(OSError):
                    self._orders.give(stop="the launcher was interrupted")
                if at_once:
                    self._end_ranks_here()
                for limit_s in (lambda: self._plan.grace_s + 2.0, self._finishing_s):
                    self._wait_for_program(limit_s())
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):
                if self._process is not None and not self.has_left:
                    with suppress(ProcessLookupError):
                        os.killpg(self._process.pid, number)
                    self._wait_for_program(2.0)
            self._end_ranks_here()
            self.states = read_states(self._dir, self._plan.ranks, self._attempt)

    def _wait_for_end(self) -> None:
        """Wait for the end of the program; longer where a rank finishes a save."""
        end = time.monotonic() + self._plan.grace_s + LEAVE_S
        while not self.has_left and time.monotonic() < end + self._finishing_s():
            self.wait(None)

    def _wait_for_program(self, limit_s: float) -> None:
        if self._process is not None and not self.has_left:
            with suppress(subprocess.TimeoutExpired):
                self.exit_code = self._process.wait(limit_s)
                self.has_left = True

    def _finishing_s(self) -> float:
        """Return how long ranks may take that finish a save before they end."""
        states = read_states(self._dir, self._plan.ranks, self._attempt)
        return max(state.finishing_s for state in states)

    def _end_ranks_here(self) -> None:
        """Kill ranks of this host that outlived the program, if they still are what they were."""
        for state in read_states(self._dir, self._plan.ranks, self._attempt):
            is_here = state.pid and state.host == socket.gethostname()
            if is_here and job_files.process_start(state.pid) == state.pid_start:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(state.pid, signal.SIGKILL)


def ask_for_stacks(directory: Path, ranks: int, attempt: int) -> dict[int, str]:
    """Have the agents of an attempt take stacks; return those that come in time."""
    dumps = StackDumps({rank: directory / f"rank-{rank}.stack" for rank in range(ranks)})
    try:
        Orders(directory, attempt).give(stack=True)
    except OSError:
        return {}
    return {rank: user_threads(text) for rank, text in dumps.wait().items()}


class LaunchedRanks(ProgramRanks):
    """The ranks of a program that this very launcher starts; it shows their output.

    Args:
        job: what ranks are told.
        plan: its plain facts.
        attempt: number of the attempt.
        command: the program, to which the directory and the number of the attempt are added.
        env: its variables.
        console: where output is shown.
        job_dir: directory of the run.
        entry: more for `job.json`.
    """

    def __init__(
        self,
        job: Job,
        plan: Plan,
        attempt: int,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        console: Console,
        job_dir: Path,
        entry: Mapping[str, Any] | None = None,
    ) -> None:
        if stdin_rank(env, plan.ranks) is not None:
            raise PlatformError.because(
                f'{STDIN_VARIABLE} with on="{job.platform.kind.value}"',
                "ranks of another program, which have no terminal",
                None,
                'on="cpu", where one rank can have it, or on="inline"',
            )
        me = os.getpid()
        launcher = socket.gethostname(), me, job_files.process_start(me) or 0
        plan = replace(plan, launcher=launcher)
        job_files.update_state(job_dir, {"plan": plan.as_json(), **(entry or {})})
        write_payload(job, job_dir / mailbox.PAYLOAD)
        words = [*command, str(job_dir), str(attempt)]
        super().__init__(job_dir, plan, attempt, words, env=env, on_look=self._show)
        self._console = console
        self._follower = LogFollower(job_dir, console, range(plan.ranks), tail=0)
        self._told = 0

    def _show(self) -> None:
        self._follower.look()
        text = text_from(self._dir / mirror.NOTICE, self._told)
        if text and self._console.shows_any:
            self._told += len(text.encode())
            print(text, end="", file=sys.stderr, flush=True)

    def close(self, *, at_once: bool | None) -> None:
        """Leave neither the program nor a rank of this host behind."""
        try:
            super().close(at_once=at_once)
        finally:
            self._follower.close()
        if at_once is None and (reason := text_from(self._dir / mirror.REFUSED)):
            raise PlatformError(reason)


def on_copies(
    job: Job, plan: Plan, attempt: int, place: str, entry: Mapping[str, Any], **shown: Any
) -> LaunchedRanks:
    """Return ranks on hosts that need share no directory, started by our own program there.

    `entry` is what the program has to know, beside the plan, in `job.json`. The variables of this
    process stay here, but for those that are meant for ranks.
    """
    environment = job.setting.environment
    told = mirror.job_entry(environment)
    variables = {**told.pop("variables"), **(job.platform.env or {})}
    return LaunchedRanks(
        replace(
            job,
            setting=replace(job.setting, environment={}),
            platform=job.platform.but(env=variables),
        ),
        replace(plan, env=variables),
        attempt,
        [sys.executable, "-P", "-m", f"unisono.launch.places.{place}"],
        env=environment,
        entry={**told, place: dict(entry)},
        **shown,
    )
