"""The handle on a job that another process supervises, made from the directory of that job."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from unisono.errors import PlatformError, RankFailed
from unisono.launch import job_files
from unisono.launch.job import ENDS, POLL_S, Job
from unisono.launch.results import Results
from unisono.launch.stacks import user_threads

STACKS_S = 2.0
"""Longest wait for the stacks of ranks that another process supervises."""


def attach(id_or_dir: str | Path) -> Job:
    """Return a handle on the job with this id, of a scheduler too, or in this directory."""
    directory = _directory_of_id(str(id_or_dir)) or job_files.find_directory(id_or_dir)
    if job_files.read_state(directory).get("kind") == "slurm":
        from unisono.launch.slurm.job import SlurmJob

        return SlurmJob(directory)
    return AttachedJob(directory)


def _directory_of_id(job: str) -> Path | None:
    """Return the directory of the job with exactly this id, near here or known to a scheduler."""
    for path in job_files.LOCAL_JOBS.glob(f"*/{job_files.STATE}"):
        with suppress(PlatformError):
            if str(job_files.read_state(path.parent).get("id")) == job:
                return path.parent.absolute()
    if not job.isdigit():
        return None
    from unisono.launch.slurm.commands import directory_of_job

    return directory_of_job(job)


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
        """Return where every rank of this host stands; nothing if none runs."""
        asked: dict[int, tuple[Path, int]] = {}
        for path in self.dir.glob("rank-*.pid"):
            job_files.check_ours(path)
            pid, start, name = path.read_text().split()
            if str(job_files.process_start(int(pid))) == start:
                stack = path.with_suffix(".stack")
                asked[int(path.stem.removeprefix("rank-"))] = stack, stack.stat().st_size
                os.kill(int(pid), signal.Signals[name])
        return _written(asked)

    def _read(self) -> dict[str, Any]:
        return job_files.read_state(self.dir)

    def _is_alive(self, state: dict[str, Any]) -> bool:
        return job_files.process_start(state["pid"]) == state["pid_start"]


def _written(asked: Mapping[int, tuple[Path, int]]) -> dict[int, str]:
    """Return what ranks write to their stack files after the given places, once they have."""
    end = time.monotonic() + STACKS_S
    texts: dict[int, str] = {}
    while time.monotonic() < end:
        before = texts
        texts = {rank: text for rank, (path, at) in asked.items() if (text := _after(path, at))}
        if texts == before and len(texts) == len(asked):
            break
        time.sleep(POLL_S / 2)
    return {rank: user_threads(text) for rank, text in texts.items()}


def _after(path: Path, place: int) -> str:
    with path.open("rb") as file:
        file.seek(place)
        return file.read().decode(errors="replace")
