"""The handle on a SLURM job: its directory tells most, the scheduler the rest."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from unisono.errors import JobCancelled, RankFailed, RankTimeout
from unisono.launch import job_files
from unisono.launch.attempts import PROGRESS, Progress, results_of
from unisono.launch.job import ENDS, Job, State
from unisono.launch.places.mailbox import CANCEL, Mailbox
from unisono.launch.places.slurm import cluster
from unisono.launch.results import Results

LOST_S = 30.0
"""How long files of a job may take to appear after it has left the queue."""
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
    """A job of the scheduler."""

    CANCEL_S = 90.0

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._left_at: float | None = None
        self._end_by_scheduler: tuple[str, str] | None = None
        cluster.QUEUE.forget()

    def announcements(self) -> list[str]:
        """Return one line for each attempt so far that follows a failed one."""
        return Progress.read(self.dir).announced

    def cancel(self) -> None:
        if not self.done():
            job_files.write_private(self.dir / CANCEL, b"")
            cluster.call("scancel", self.id, check=False)
            cluster.QUEUE.forget()
        super().cancel()

    def stacks(self) -> dict[int, str]:
        state = self._look()
        if state.name != "running":
            return {}
        return Mailbox(self.dir, state.attempt).ask_for_stacks(self.ranks)

    def _look(self) -> State:
        """Return how it stands; as its reason why it waits, in the scheduler's words."""
        progress = Progress.read(self.dir)
        attempt = max(0, progress.attempt)
        if (ending := progress.ending) is not None:
            name = ending.state if ending.state in ENDS and not progress.message else "failed"
            words = progress.message or (progress.causes or [""])[-1]
            return State(name, attempt, "" if name == "done" else words.split("\n")[0])
        if self._end_by_scheduler is not None:
            return State(self._end_by_scheduler[0], attempt, self._end_by_scheduler[1])
        state, reason = self._scheduler() or ("", "the scheduler has forgotten it")
        told = "" if reason == "None" else reason
        if state in _WAITING:
            return State("requeued" if progress.attempt >= 0 else "pending", attempt, told)
        if state in _GOING:
            self._left_at = None
            is_requeued = progress.state == "requeued"
            return State("requeued" if is_requeued else "running", attempt, told)
        limit_s = 2.0 if state in _ENDS else LOST_S
        return self._gone(_ENDS.get(state, "failed"), attempt, f"{state}: {reason}", limit_s)

    def _results(self) -> Results[Any]:
        state, progress = self._look(), Progress.read(self.dir)
        if state.name == "cancelled":
            raise JobCancelled(f"job {self.id} was cancelled ({state.reason})", job_id=self.id)
        if (ending := progress.ending) is None:
            raise self._error_by_scheduler()
        mail = Mailbox(self.dir, ending.attempt)
        return results_of(
            progress,
            mail.read_states(self.ranks),
            mail.read_value,
            place="slurm",
            threads=int(self._entry["plan"]["cpus_per_rank"]),
            job_dir=self.dir,
            is_kept=True,
        )

    def _scheduler(self) -> tuple[str, str] | None:
        """Return state and reason; asks for this job alone where the queue does not list it."""
        if (known := cluster.QUEUE.look(self.id)) is not None:
            return known
        fields = cluster.show_job(self.id)
        return (fields["JobState"], fields.get("Reason", "")) if "JobState" in fields else None

    def _gone(self, name: str, attempt: int, reason: str, limit_s: float) -> State:
        """The job is over, but says nothing: its files may be slow, so wait a while."""
        now = time.monotonic()
        self._left_at = self._left_at or now
        if now < self._left_at + limit_s:
            return State("running", attempt, reason)
        if (self.dir / CANCEL).exists():
            name = "cancelled"
        self._end_by_scheduler = (name, reason)
        return State(name, attempt, reason)

    def _error_by_scheduler(self) -> RankFailed | RankTimeout:
        """Return the error of a job that ended without a word of its own."""
        state, reason = self._end_by_scheduler or ("failed", "")
        fields = cluster.show_job(self.id)
        if state == "timeout":
            limit = fields.get("TimeLimit", "")
            return RankTimeout(
                f"job {self.id} reached its time limit of {limit} ({reason})\n"
                "HINT: a longer timeout_min, or save and requeue when should_stop() says so; "
                f"logs are in {self.dir}"
            )
        hint = f"HINT: logs are in {self.dir}"
        if not (self.dir / PROGRESS).exists():  # not even the batch script has begun
            hint = f"HINT: logs= with a directory that all nodes see, if they do not see {self.dir}"
        code = f", exit code {fields['ExitCode']}" if "ExitCode" in fields else ""
        return RankFailed(
            f"job {self.id} ended without a result ({reason}{code})\n{hint}",
            job_dir=str(self.dir),
            attempt=self.attempt,
        )
