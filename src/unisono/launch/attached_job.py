"""The handle on a job that another process supervises, made from the directory of that job."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from unisono.errors import RankFailed
from unisono.launch import job_files
from unisono.launch.job import ENDS, POLL_S, Job
from unisono.launch.results import Results


class AttachedJob(Job):
    """A job of another process, known by its directory."""

    def __init__(self, directory: Path) -> None:
        self.dir = directory
        self.id = str(self._read()["id"])

    @property
    def attempt(self) -> int:
        """Number of the present attempt."""
        return int(self._read()["attempt"])

    @property
    def reason(self) -> str:
        """The first line of what went wrong, if something did."""
        state = self._read()
        lost = state["state"] not in ENDS and not self._is_alive(state)
        return "its process is gone" if lost else str(state["reason"])

    def status(self) -> str:
        """Return the state in one word; a job whose process was killed has failed."""
        state = self._read()
        if state["state"] not in ENDS and not self._is_alive(state):
            return "failed"
        return str(state["state"])

    def wait(self, timeout_s: float | None = None) -> bool:
        """Look at its directory until it has ended."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.done():
            if end is not None and time.monotonic() > end:
                return False
            time.sleep(POLL_S)
        return True

    def result(self, timeout_s: float | None = None) -> Results[Any]:
        """Wait, and return the results or raise what went wrong."""
        if not self.wait(timeout_s):
            raise TimeoutError(f"job {self.id} has not ended within {timeout_s:g} s")
        if self._read()["state"] not in ENDS:
            raise RankFailed(f"job {self.id} failed: {self.reason}", job_dir=str(self.dir))
        outcome = job_files.read_outcome(self.dir)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def cancel(self) -> None:
        """Ask the supervising process to end."""
        state = self._read()
        if not self.done():
            os.kill(state["pid"], signal.SIGTERM)
            self.wait(30.0)

    def stacks(self) -> dict[int, str]:
        """Not to be had from outside of the supervising process; the ranks' files may tell."""
        stacks: dict[int, str] = {}
        for path in self.dir.glob("rank-*.stack"):
            if text := path.read_text(errors="replace"):
                stacks[int(path.stem.removeprefix("rank-"))] = text
        return stacks

    def _read(self) -> dict[str, Any]:
        return job_files.read_state(self.dir)

    def _is_alive(self, state: dict[str, Any]) -> bool:
        return job_files.process_start(state["pid"]) == state["pid_start"]
