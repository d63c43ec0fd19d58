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
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from unisono.errors import PlatformError
from unisono.launch import job_files
from unisono.launch.logs import (
    STDIN_VARIABLE,
    Console,
    LogFollower,
    LogReader,
    text_from,
)
from unisono.launch.places import mailbox
from unisono.launch.places.mailbox import Mailbox, Plan
from unisono.launch.pool.payload import Parcel
from unisono.launch.pool.protocol import Job, RankState, write_payload
from unisono.launch.pool.verdict import STARTER_LOG
from unisono.launch.supervisor import Ranks
from unisono.processes import process_start

LEAVE_S = 15.0
"""Longest time from an order to the end of the program."""


class ProgramRanks(Ranks):
    """The ranks of one attempt that a program starts.

    Args:
        directory: of the job.
        plan: its plain facts.
        attempt: number of the attempt.
        command: starts one agent for each rank, and ends when they have; it is told the directory
            and the number of the attempt.
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
        self._command = [*command, str(directory), str(attempt)]
        self._env = env
        self._on_look = on_look
        self._mail = Mailbox(directory, attempt)
        self.states = [RankState(rank=rank, attempt=attempt) for rank in range(plan.ranks)]
        self._began = time.monotonic()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._mail.open()
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
        pause = mailbox.pause_s(time.monotonic() - self._began, self._plan.ranks)
        self._wait_for_program(pause if timeout_s is None else min(pause, timeout_s))
        self._on_look()
        before = list(self.states)
        for rank, known in enumerate(before):
            if not known.is_good and not known.is_bad:
                self.states[rank] = self._mail.read_state(rank) or known
        return self.states != before

    def wake(self) -> None:
        """Do nothing: `wait` returns soon by itself."""

    def interrupt(self, seconds: float) -> None:
        self._mail.order(interrupt=seconds)

    def finish(self) -> None:
        self._mail.order(finish=True)
        self._wait_for_end()

    def stop(self, reason: str) -> None:
        self._mail.order(stop=reason)
        self._wait_for_end()

    def stacks(self) -> dict[int, str]:
        return self._mail.ask_for_stacks(self._plan.ranks)

    def value(self, rank: int) -> Parcel:
        return self._mail.read_value(rank)

    def close(self, *, at_once: bool | None) -> None:
        try:
            if at_once is not None:
                with suppress(OSError):
                    self._mail.order(stop="the launcher was interrupted")
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
            self.states = self._mail.read_states(self._plan.ranks)

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
        return max(state.finishing_s for state in self._mail.read_states(self._plan.ranks))

    def _end_ranks_here(self) -> None:
        """Kill ranks of this host that outlived the program, if they still are what they were."""
        for state in self._mail.read_states(self._plan.ranks):
            is_here = state.pid and state.host == socket.gethostname()
            if is_here and process_start(state.pid) == state.pid_start:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(state.pid, signal.SIGKILL)


class LaunchedRanks(ProgramRanks):
    """The ranks of a program that this very launcher starts; it shows their output.

    Args:
        job: what ranks are told.
        plan: its plain facts.
        attempt: number of the attempt.
        command: the program.
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
        if console.raw_rank is not None:
            raise PlatformError.because(
                f'{STDIN_VARIABLE} with on="{job.platform.kind.value}"',
                "ranks of another program, which have no terminal",
                None,
                'on="cpu", where one rank can have it, or on="inline"',
            )
        me = os.getpid()
        launcher = socket.gethostname(), me, process_start(me) or 0
        plan = replace(plan, launcher=launcher)
        job_files.update_state(job_dir, {"plan": asdict(plan), **(entry or {})})
        write_payload(job, job_dir / mailbox.PAYLOAD)
        super().__init__(job_dir, plan, attempt, command, env=env, on_look=self._show)
        self._console = console
        self._follower = LogFollower(job_dir, console, range(plan.ranks), tail=0)
        self._notices = LogReader(job_dir / mailbox.NOTICE, tail=0)

    def _show(self) -> None:
        self._follower.look()
        for text in self._notices.new():
            if self._console.shows_any:
                print(text.decode(), end="", file=sys.stderr, flush=True)

    def close(self, *, at_once: bool | None) -> None:
        try:
            super().close(at_once=at_once)
        finally:
            self._follower.close()
        if at_once is None and (reason := text_from(self._dir / mailbox.REFUSED)):
            raise PlatformError(reason)
