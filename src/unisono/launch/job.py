"""`Job`: the handle on a run in the background.

`LocalJob` is a run that a thread of this process supervises, wherever its ranks are;
`places/slurm/` has the handle on a job of a scheduler.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, NamedTuple, overload

from unisono.errors import JobCancelled, PlatformError, RankFailed, RankTimeout
from unisono.expect import expect_int
from unisono.launch.attempts import LauncherAttempts, job_directory, telling
from unisono.launch.logs import LogReader
from unisono.launch.pool.payload import dump_call
from unisono.launch.pool.stacks import own_frames_hidden
from unisono.launch.request import RunRequest
from unisono.launch.results import Results

__all__ = ["Job"]

ENDS = ("done", "failed", "timeout", "cancelled")
"""Final states."""
POLL_S = 0.1
"""Seconds between two looks at a log."""


class JobState(NamedTuple):
    """The state of a job."""

    name: str
    attempt: int
    reason: str


class Job(ABC):
    """The handle on a run in the background.

    Attributes:
        id: name of the job.
        dir: its directory, with the logs.
        ranks: number of ranks.
    """

    id: str
    dir: Path
    ranks: int

    @staticmethod
    def attach(id_or_dir: str | Path) -> Job:
        """Return the handle on a job of SLURM, from any process.

        Args:
            id_or_dir: its number, or its directory.
        """
        from unisono.launch.places.slurm.submit import SlurmJob

        return SlurmJob.find(id_or_dir)

    @property
    def attempt(self) -> int:
        """Number of the current attempt."""
        return self._look().attempt

    @property
    def reason(self) -> str:
        """Why it is in its state, in one line."""
        return self._look().reason

    def status(self) -> str:
        """Return `pending`, `running`, `requeued`, `done`, `failed`, `timeout` or `cancelled`."""
        return self._look().name

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self.status() in ENDS

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end of the job; return whether it came in time."""

    def result(self, timeout_s: float | None = None) -> Results[Any]:
        """Wait, and return the results or raise what went wrong (`TimeoutError`: not yet)."""
        with own_frames_hidden():
            if not self.wait(timeout_s):
                raise TimeoutError(f"job {self.id} has not ended within {timeout_s:g} s")
            return self._results()

    @abstractmethod
    def cancel(self) -> None:
        """End all ranks and wait until they have ended. Safe to repeat."""

    def resize(self, ranks: int) -> None:
        """Change the number of ranks from the next step on; for jobs with `elastic=True`."""
        raise PlatformError.because(
            f"job {self.id} with {ranks} ranks",
            "it is not elastic, or on SLURM, which gives a job its nodes once",
            None,
            "unisono.submit(..., ranks=(1, 8))",
        )

    def members(self) -> int:
        """Return how many ranks train in an elastic job now; 0 before the first step."""
        from unisono.launch.elastic.policy import read_events

        events = read_events(self.dir)
        return int(events[-1]["members"]) if events else 0

    @abstractmethod
    def stacks(self) -> dict[int, str]:
        """Return the stacks of all ranks; nothing if none runs."""

    @overload
    def logs(self, rank: int = 0, *, tail: int | None = None) -> str: ...
    @overload
    def logs(self, rank: int = 0, *, follow: Literal[True]) -> Iterator[str]: ...
    def logs(
        self, rank: int = 0, *, follow: bool = False, tail: int | None = None
    ) -> str | Iterator[str]:
        """Return what a rank has printed, or yield its lines until the job has ended.

        Args:
            rank: which rank.
            follow: whether to wait for more.
            tail: number of lines from the end.
        """
        expect_int("rank", rank, 0, self.ranks, error=PlatformError)
        if follow:
            return self._follow(self.dir / f"rank-{rank}.log")
        lines = self._log_text(rank).splitlines(keepends=True)
        return "".join(lines if tail is None else lines[max(0, len(lines) - tail) :])

    def _log_text(self, rank: int) -> str:
        path = self.dir / f"rank-{rank}.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def _follow(self, path: Path) -> Iterator[str]:
        log, rest = LogReader(path), b""
        while True:
            is_over = self.done()
            whole, end, rest = (rest + log.new()).rpartition(b"\n")
            data = whole + end + rest if is_over else whole
            yield from data.decode(errors="replace").splitlines()
            if is_over:
                return
            time.sleep(POLL_S)

    @abstractmethod
    def _look(self) -> JobState:
        """Return the current state."""

    @abstractmethod
    def _results(self) -> Results[Any]:
        """Return the results of a job that has ended, or raise its error."""

    def __repr__(self) -> str:
        return f"<Job {self.id} {self.status()}>"


class LocalJob(Job):
    """A run that a thread of this process supervises; its ranks end with this process."""

    def __init__(self, request: RunRequest) -> None:
        """Start a checked request in the background."""
        call = dump_call(request.fn, request.args, request.kwargs)
        self._state, self._reason = "pending", ""
        with ExitStack() as stack:  # which removes the directory of a run that is refused
            self.dir = stack.enter_context(job_directory(request))
            self._launch = LauncherAttempts(request, call, self.dir, self._note)
            self._stack = stack.pop_all()
        self.id = self.dir.name
        self.ranks = request.ranks
        self._outcome: Results[Any] | BaseException | None = None
        self._ended = threading.Event()
        _running.add(self)
        threading.Thread(target=self._run, name=f"unisono-job-{self.id}", daemon=True).start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end of the job; return whether it came in time."""
        return self._ended.wait(timeout_s)

    def cancel(self) -> None:
        """End all ranks, and wait until they have."""
        if not self._ended.is_set():
            self._launch.cancel()
            self._ended.wait()

    def resize(self, ranks: int) -> None:
        """Change the number of ranks from the next step on; for jobs with `elastic=True`."""
        elastic = self._launch.request.elastic
        if elastic is None:
            super().resize(ranks)
            return
        expect_int("ranks", ranks, elastic.least, elastic.most + 1, error=PlatformError)
        if self._ended.is_set():
            raise PlatformError.because(f"job {self.id} with {ranks} ranks", "it has ended")
        self._launch.resize(ranks)

    def stacks(self) -> dict[int, str]:
        """Return the stacks of all ranks."""
        return {} if self._ended.is_set() else self._launch.stacks()

    def _look(self) -> JobState:
        return JobState(self._state, max(0, self._launch.progress.attempt), self._reason)

    def _results(self) -> Results[Any]:
        if isinstance(self._outcome, Results):
            return self._outcome
        raise self._outcome or RankFailed(f"job {self.id} left no results")

    def _log_text(self, rank: int) -> str:
        if isinstance(self._outcome, Results):
            return self._outcome.log(rank)
        return super()._log_text(rank)

    def _run(self) -> None:
        end = "failed"
        try:
            with self._stack, telling(self._launch.request.platform):
                self._outcome = self._launch.results()
            end = "done"
        except JobCancelled as error:
            self._outcome, end = JobCancelled(str(error), job_id=self.id), "cancelled"
        except RankTimeout as error:
            self._outcome, end = error, "timeout"
        except BaseException as error:
            self._outcome = error
        finally:
            if isinstance(self._outcome, BaseException):
                self._reason = str(self._outcome).partition("\n")[0]
            self._note(end)
            _running.discard(self)
            self._ended.set()

    def _note(self, state: str) -> None:
        self._state = state


_running: weakref.WeakSet[LocalJob] = weakref.WeakSet()
"""The jobs that this process supervises."""


def _end_running_jobs() -> None:
    """End the ranks of local jobs with this process."""
    for job in list(_running):
        job.cancel()


atexit.register(_end_running_jobs)
