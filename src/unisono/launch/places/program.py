"""Ranks whose agents are started by one program, such as mpiexec or srun."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from unisono.launch.places.agent import INVITATION, mpi_descriptors
from unisono.launch.places.agents import LEAVE_S, AgentRanks
from unisono.launch.pool import verdict
from unisono.launch.pool.protocol import RankJob, RunPlan


class ProgramRanks(AgentRanks):
    """The ranks of one attempt, whose agents one program starts; it ends with the last of them.

    Args:
        job: of the ranks; None if the directory has the payload already.
        plan: of the run.
        attempt: number of the attempt.
        command: the program and its arguments.
        env: its variables.
        more: what `AgentRanks` takes besides.
    """

    def __init__(
        self,
        job: RankJob | None,
        plan: RunPlan,
        attempt: int,
        *,
        command: Sequence[str],
        env: Mapping[str, str],
        **more: Any,
    ) -> None:
        super().__init__(job, plan, attempt, **more)
        self._command, self._env = command, env
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        output = os.open(self._dir / verdict.STARTER_LOG, flags, 0o600)
        try:
            # A session of its own: signals to our process group are for the ranks alone, and
            # srun would take them as the end.
            self._process = process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=mpi_descriptors(self._env),
                env={**self._env, INVITATION: str(self.invitation)},
            )
        finally:
            os.close(output)

        def wait() -> None:
            process.wait()
            self.wake()

        threading.Thread(target=wait, name="unisono-starter", daemon=True).start()

    def starter_has_ended(self) -> bool:
        """Whether the program has ended, so that no more agents will come."""
        if self._process is not None:
            self.exit_code = self._process.poll()
        return self.exit_code is not None

    def wait_for_agents(self, limit_s: float | None = None) -> None:
        super().wait_for_agents(limit_s)
        if self._process is not None and all(seat.is_over for seat in self._seats):
            with suppress(subprocess.TimeoutExpired):  # it ends after its agents
                self._process.wait(LEAVE_S if limit_s is None else 0.5)

    def end_agents(self) -> None:
        """End the program, and the agents with it."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._process is not None and self._process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, number)
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(2.0)
