"""The handle on a job that another process supervises, made from the directory of that job."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unisono.errors import JobCancelled, PlatformError, RankFailed, RemoteError
from unisono.launch import job_files, registry
from unisono.launch.job import ENDS, POLL_S, Job
from unisono.launch.pool.remote import CANCEL
from unisono.launch.results import Results
from unisono.launch.stacks import user_threads

STACKS_S = 2.0
"""Longest wait for the stacks of ranks that another process supervises."""
CANCEL_S = 30.0
"""Longest wait for the end of a job that was told to end."""


def attach(id_or_dir: str | Path) -> Job:
    """Return a handle on the job with this id, of a scheduler too, or in this directory."""
    directory = _find(id_or_dir)
    if job_files.read_state(directory).get("kind") == "slurm":
        from unisono.launch.slurm.job import SlurmJob

        return SlurmJob(directory)
    return AttachedJob(directory)


def _find(id_or_dir: str | Path) -> Path:
    """Return the directory of a job: itself, known by its id or a unique part, or a scheduler's."""
    path, word = Path(id_or_dir), str(id_or_dir)
    if (path / job_files.STATE).is_file():
        return path.absolute()
    known = registry.directories()
    if word in known:
        return known[word]
    if word.isdigit():
        from unisono.launch.slurm.commands import directory_of_job

        if (directory := directory_of_job(word)) is not None:
            return directory
    near = [job for job in known if word and (job.startswith(word) or job.endswith(word))]
    if len(near) == 1:
        return known[near[0]]
    latest = sorted(known, key=lambda job: (known[job] / job_files.STATE).stat().st_mtime)[-8:]
    raise PlatformError.because(
        f"the job {id_or_dir}",
        f"{len(near)} jobs with that in their names: {', '.join(near)}"
        if near
        else f"no such job here, in {registry.folder()}, nor of a scheduler",
        None,
        f"unisono job list; the latest are {', '.join(latest)}" if latest else "its directory",
    )


class AttachedJob(Job):
    """A job of another process, known by its directory."""

    def __init__(self, directory: Path) -> None:
        self.dir = directory
        self._known = job_files.read_state(directory)
        self._is_cancelled = False
        self.id = str(self._known["id"])

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return int(self._known["ranks"])

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
        if not self.dir.is_dir():
            if self._is_cancelled:
                raise JobCancelled(f"job {self.id} was cancelled", job_id=self.id)
            raise PlatformError.because(
                f"the results of job {self.id}",
                f"{self.dir} was temporary, and is gone",
                None,
                'logs="runs" when it is submitted keeps them',
            )
        outcome = job_files.read_outcome(self.dir)
        if isinstance(outcome, RankFailed):  # the traceback is shown once, here or there
            text = (outcome.traceback or "").rstrip()
            raise outcome from (None if text in str(outcome) else RemoteError(text))
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def cancel(self) -> None:
        """Leave the order to end all ranks, and stay until they have."""
        if not self.done():
            job_files.write_private(self.dir / CANCEL, b"")
            self._is_cancelled = True
            self.wait(CANCEL_S)

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
        """Return how it stands; a temporary directory goes with a job that did not fail."""
        try:
            self._known = job_files.read_state(self.dir)
        except (OSError, PlatformError):
            if (self.dir / job_files.STATE).exists():
                raise
            self._known["state"] = "cancelled" if self._is_cancelled else "done"
        return self._known

    def _is_alive(self, state: dict[str, Any]) -> bool:
        if state.get("host", socket.gethostname()) != socket.gethostname():
            return True  # nobody here can tell
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
