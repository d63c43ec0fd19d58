"""The handle on a SLURM job: its directory tells most, the scheduler the rest."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

from unisono.errors import JobCancelled, RankFailed, RankTimeout
from unisono.launch import file_outcome, job_files
from unisono.launch.job import ENDS, Job
from unisono.launch.pool.remote import CANCEL, ask_for_stacks
from unisono.launch.results import Results
from unisono.launch.slurm import commands
from unisono.launch.slurm.driver import PROGRESS, End, Progress
from unisono.launch.slurm.queue import QUEUE

LOST_S = 30.0
"""How long files of a job may take to appear after it has left the queue."""
CANCEL_S = 90.0
"""Longest wait for the end of a cancelled job."""
_GOING = ("CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT")
_WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
_ENDS = {
    "CANCELLED": "cancelled",
    "PREEMPTED": "cancelled",
    "TIMEOUT": "timeout",
    "DEADLINE": "timeout",
}
"""States in which a job is over, whatever its files say; all others wait for the files."""


class SlurmJob(Job):
    """A job of the scheduler, or of an allocation that this process is in."""

    def __init__(self, directory: Path, process: subprocess.Popen[bytes] | None = None) -> None:
        self.dir = directory
        self._entry = job_files.read_state(directory)
        self.id = str(self._entry["id"])
        self._process = process
        self._left_at: float | None = None
        self._end_by_scheduler: tuple[str, str] | None = None
        QUEUE.forget()

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return int(self._entry["ranks"])

    @property
    def attempt(self) -> int:
        """Number of the present attempt."""
        return max(0, Progress.read(self.dir).attempt)

    def announcements(self) -> list[str]:
        """Return one line for each attempt so far that follows a failed one."""
        return Progress.read(self.dir).announced

    @property
    def reason(self) -> str:
        """Why it waits, in the scheduler's words, or the first line of what went wrong."""
        if (end := End.read(self.dir)) is not None:
            if end.ending.state == "done":
                return ""
            return (end.message or (end.causes or ("",))[-1]).split("\n")[0]
        _, reason = self._end_by_scheduler or self._scheduler() or ("", "")
        return "" if reason == "None" else reason

    def status(self) -> str:
        """Return the state in one word."""
        if (end := End.read(self.dir)) is not None:
            self._let_go()
            state = "failed" if end.message else end.ending.state
            return state if state in ENDS else "failed"
        if self._end_by_scheduler is not None:
            return self._end_by_scheduler[0]
        progress = Progress.read(self.dir)
        before = "requeued" if progress.attempt >= 0 else "pending"
        if "pid" in self._entry:
            is_alive = self._is_driver_alive()
            return self._gone("failed", "its process is gone") if not is_alive else "running"
        state, reason = self._scheduler() or ("", "the scheduler has forgotten it")
        if state in _WAITING:
            return before
        if state in _GOING:
            self._left_at = None
            return "requeued" if progress.state == "requeued" else "running"
        if state in _ENDS:
            return self._gone(_ENDS[state], f"{state}: {reason}", limit_s=2.0)
        return self._gone("failed", f"{state}: {reason}")

    def wait(self, timeout_s: float | None = None) -> bool:
        """Look at its directory, and now and then at the queue, until it has ended."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        pause = 0.05
        while not self.done():
            if end is not None and time.monotonic() > end:
                return False
            time.sleep(pause)
            pause = min(0.5, 1.1 * pause)
        return True

    def result(self, timeout_s: float | None = None) -> Results[Any]:
        """Wait, and return the results or raise what went wrong."""
        if not self.wait(timeout_s):
            raise TimeoutError(f"job {self.id} has not ended within {timeout_s:g} s")
        end = End.read(self.dir)
        if self.status() == "cancelled":
            raise JobCancelled(f"job {self.id} was cancelled ({self.reason})", job_id=self.id)
        if end is None:
            raise self._error_by_scheduler()
        if end.message:
            raise RankFailed(end.message, job_dir=str(self.dir), attempt=end.ending.attempt)
        if end.ending.state == "done":
            threads = int(self._entry["threads"])
            return file_outcome.read_results(
                self.dir, self.ranks, end.ending, platform="slurm", threads=threads
            )
        error = file_outcome.read_error(self.dir, self.ranks, end.ending)
        if len(end.causes) > 1:
            error.add_note("\n".join(end.causes))
        raise error

    def cancel(self) -> None:
        """End all ranks, also of a job that waits, and stay until they have."""
        if self.done():
            return
        job_files.write_private(self.dir / CANCEL, b"")
        if "pid" not in self._entry:
            commands.call("scancel", self.id, check=False)
        QUEUE.forget()
        self.wait(CANCEL_S)

    def stacks(self) -> dict[int, str]:
        """Return where every rank stands."""
        if self.status() != "running":
            return {}
        return ask_for_stacks(self.dir, self.ranks, self.attempt)

    def _scheduler(self) -> tuple[str, str] | None:
        """Return state and reason; asks for this job alone where the queue does not list it."""
        if (known := QUEUE.look(self.id)) is not None:
            return known
        fields = commands.show_job(self.id)
        return (fields["JobState"], fields.get("Reason", "")) if "JobState" in fields else None

    def _gone(self, state: str, reason: str, *, limit_s: float = LOST_S) -> str:
        """The job is over, but says nothing: its files may be slow, so wait a while."""
        now = time.monotonic()
        self._left_at = self._left_at or now
        if now < self._left_at + limit_s:
            return "running"
        if (self.dir / CANCEL).exists():
            state = "cancelled"
        self._end_by_scheduler = (state, reason)
        self._let_go()
        return state

    def _error_by_scheduler(self) -> RankFailed | RankTimeout:
        """Return the error of a job that ended without a word of its own."""
        state, reason = self._end_by_scheduler or ("failed", "")
        fields = commands.show_job(self.id)
        limit = fields.get("TimeLimit", "")
        hint = f"HINT: logs are in {self.dir}"
        if not (self.dir / PROGRESS).exists():  # not even the batch script has begun
            hint = f"HINT: logs= with a directory that all nodes see, if they do not see {self.dir}"
        if state == "timeout":
            return RankTimeout(
                f"job {self.id} reached its time limit of {limit} ({reason})\n"
                "HINT: a longer timeout_min, or save and requeue when should_stop() says so; "
                f"logs are in {self.dir}"
            )
        code = fields.get("ExitCode", "")
        return RankFailed(
            f"job {self.id} ended without a result ({reason}"
            + (f", exit code {code})" if code else ")")
            + f"\n{hint}",
            job_dir=str(self.dir),
            attempt=self.attempt,
        )

    def _is_driver_alive(self) -> bool:
        if self._process is not None:
            return self._process.poll() is None
        start = job_files.process_start(self._entry["pid"])
        return start is not None and start == self._entry["pid_start"]

    def _let_go(self) -> None:
        """Take notice of the end of a driver that we started."""
        if self._process is not None:
            self._process.wait()
