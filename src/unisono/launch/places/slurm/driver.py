"""The process of the batch script: one `srun` for each attempt, until there is an end.

    python -m unisono.launch.places.slurm.driver DIRECTORY

How far it got, and what came of it, is in `progress.json`, which a requeued job reads again. Inside
an allocation there is no such process: the launcher itself starts `srun` (`srun_ranks`).
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

from unisono.errors import PlatformError
from unisono.launch import job_files
from unisono.launch.attempts import Attempts, Progress
from unisono.launch.places.mailbox import CANCEL, INTERRUPT, Plan
from unisono.launch.places.program import LaunchedRanks, ProgramRanks
from unisono.launch.places.slurm.cluster import call, check_programs, show_job
from unisono.launch.places.slurm.script import srun_command
from unisono.launch.pool.protocol import Job


def srun_ranks(job: Job, plan: Plan, attempt: int, **shown: Any) -> LaunchedRanks:
    """Return the ranks of a job on the nodes that this process has already."""
    check_programs()
    kind = LaunchedRanks
    if plan.elastic is not None:
        from unisono.launch.places.elastic import ElasticLaunchedRanks as kind
    words = srun_command(plan)
    return kind(job, plan, attempt, words, env=job.setting.environment, **shown)


class Driver(Attempts):
    """Runs the attempts of a job of the scheduler."""

    def __init__(self, directory: Path) -> None:
        super().__init__(Plan.read(directory), directory, Progress.read(directory))

    def exit_code(self) -> int:
        """Go on until there is an end; return the exit code of the job."""
        progress = self.progress
        if progress.ending is not None and progress.ending.state == "done":
            return 0  # SLURM starts a job again that ended while it was being pre-empted
        progress.ending, progress.message = None, ""
        is_good = self.run().state in ("done", "requeued") and not progress.message
        return 0 if is_good else 1

    def ranks(self) -> ProgramRanks:
        kind = ProgramRanks
        if self._plan.elastic is not None:
            from unisono.launch.places.elastic import ElasticProgramRanks as kind
        attempt, words = self.progress.attempt, srun_command(self._plan)
        return kind(self._job_dir, self._plan, attempt, words, on_look=self._look)

    def _look(self) -> None:
        """Heed what others have left in the directory of the job."""
        if self._supervisor is not None and self.is_cancelled():
            self._supervisor.cancel()
        elif self._supervisor is not None and (self._job_dir / INTERRUPT).exists():
            self._supervisor.ask(self._supervisor.interrupt)

    def is_cancelled(self) -> bool:
        return (self._job_dir / CANCEL).exists()

    def note(self, state: str) -> None:
        """Keep how far it has got, for a requeued job and for whoever waits."""
        self.progress.state = state
        self.progress.write(self._job_dir)

    def is_taken_away(self, *, is_requeue: bool) -> bool:
        """Whether SLURM is ending this job; it knows why, and what comes next."""
        fields = show_job(os.environ["SLURM_JOB_ID"])
        is_running = fields.get("JobState", "RUNNING") == "RUNNING"
        # Before its time limit, the ranks were warned; then it is for us to requeue it.
        return not is_running and not (is_requeue and fields.get("Reason") == "TimeLimit")

    def requeue(self) -> bool:
        job = os.environ["SLURM_JOB_ID"]
        try:
            call("scontrol", "requeue", job)
        except PlatformError as error:
            raise PlatformError(
                f"the cluster does not requeue job {job}, which has saved what it needs\n"
                f"  {error}\n"
                f"HINT: sbatch {self._job_dir / 'job.sh'} goes on from the checkpoint"
            ) from error
        return False


def drive(directory: str) -> NoReturn:
    """Be the driver of the job in `directory`."""
    # Signals are for the ranks, which SLURM tells itself.
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT):
        signal.signal(number, lambda *_: None)
    job_files.check_ours(Path(directory))
    sys.exit(Driver(Path(directory)).exit_code())


if __name__ == "__main__":
    drive(sys.argv[1])
