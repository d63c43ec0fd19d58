"""The process of the batch script: one `srun` for each attempt, until there is an end.

    python -m unisono.launch.places.slurm.driver DIRECTORY

Also run beside a launcher that is inside an allocation already (`--in-allocation`), and ends with
it if that waits (`--tied`). How far it got, and what came of it, is in `progress.json`, which a
requeued job reads again.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from unisono.errors import PlatformError
from unisono.launch import job_files
from unisono.launch.attempts import Attempts, Progress
from unisono.launch.job_files import write_private
from unisono.launch.places.mailbox import CANCEL, INTERRUPT, Plan
from unisono.launch.places.program import ProgramRanks
from unisono.launch.places.slurm.cluster import call, show_job
from unisono.launch.places.slurm.script import srun_command


class Driver(Attempts):
    """Runs the attempts of a job."""

    def __init__(self, directory: Path, *, in_allocation: bool, is_tied: bool) -> None:
        super().__init__(Plan.read(directory), directory, Progress.read(directory))
        self._is_batch = not in_allocation
        self._launcher = os.getppid() if is_tied else None

    def exit_code(self) -> int:
        """Go on until there is an end; return the exit code of the job."""
        progress = self.progress
        if progress.ending is not None and progress.ending.state == "done":
            return 0  # SLURM starts a job again that ended while it was being pre-empted
        progress.ending, progress.message = None, ""
        is_good = self.run().state in ("done", "requeued") and not progress.message
        return 0 if is_good else 1

    def ranks(self) -> ProgramRanks:
        """Return the ranks of the present attempt, for `srun` to start."""
        kind = ProgramRanks
        if self._plan.elastic is not None:
            from unisono.launch.places.elastic import ElasticProgramRanks as kind
        attempt = self.progress.attempt
        command = srun_command(self._job_dir, self._plan, attempt)
        return kind(self._job_dir, self._plan, attempt, command, on_look=self._look)

    def _look(self) -> None:
        """Heed what others have left in the directory of the job."""
        if self._launcher is not None and os.getppid() != self._launcher:
            write_private(self._job_dir / CANCEL, b"")  # ranks end with a launcher that waits
        if self._supervisor is not None and self.is_cancelled():
            self._supervisor.cancel()
        elif self._supervisor is not None and (self._job_dir / INTERRUPT).exists():
            self._supervisor.ask(self._supervisor.interrupt)

    def is_cancelled(self) -> bool:
        """Whether somebody wants the job to end."""
        return (self._job_dir / CANCEL).exists()

    def note(self, state: str) -> None:
        """Keep how far it has got, for a requeued job and for whoever waits."""
        self.progress.state = state
        self.progress.write(self._job_dir)

    def is_taken_away(self, *, is_requeue: bool) -> bool:
        """Whether SLURM is ending this job; it knows why, and what comes next."""
        if not self._is_batch:
            return False
        fields = show_job(os.environ["SLURM_JOB_ID"])
        is_running = fields.get("JobState", "RUNNING") == "RUNNING"
        # Before its time limit, the ranks were warned; then it is for us to requeue it.
        return not is_running and not (is_requeue and fields.get("Reason") == "TimeLimit")

    def requeue(self) -> bool:
        """Have SLURM start the job again; inside an allocation it is for us to do."""
        if not self._is_batch:
            return True
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


def drive(directory: str, *, in_allocation: bool = False, is_tied: bool = False) -> int:
    """Be the driver of the job in `directory`."""
    # Signals are for the ranks, which SLURM tells itself; whoever loaded this function may have
    # other handlers in place.
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT):
        signal.signal(number, lambda *_: None)
    path = Path(directory)
    job_files.check_ours(path)
    return Driver(path, in_allocation=in_allocation, is_tied=is_tied).exit_code()


def drive_for_submitit(directory: str) -> None:
    """Be the driver inside a process of submitit."""
    sys.exit(drive(directory))


if __name__ == "__main__":
    flags = sys.argv[2:]
    sys.exit(
        drive(sys.argv[1], in_allocation="--in-allocation" in flags, is_tied="--tied" in flags)
    )
