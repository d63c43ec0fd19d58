"""The process of the batch script: one `srun` for each attempt, until there is an end.

    python -m unisono.launch.places.slurm.driver DIRECTORY

Also run beside a launcher that is inside an allocation already (`--in-allocation`), and ends with
it if that waits (`--tied`). How far it got, and what came of it, is in `progress.json`, which a
requeued job reads again.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from unisono.errors import PlatformError
from unisono.launch import job_files
from unisono.launch.attempts import announcement, pause_s, too_many_requeues
from unisono.launch.job_files import write_private
from unisono.launch.places import mailbox as files
from unisono.launch.places.mailbox import CANCEL, Plan
from unisono.launch.places.remote import Ending, RemoteSupervisor, headline
from unisono.launch.places.slurm.cluster import call, show_job
from unisono.launch.places.slurm.script import srun_command

PROGRESS = "progress.json"


@dataclass
class Progress:
    """How far a job has got, over all its times in the queue."""

    attempt: int = -1
    """Number of the present attempt."""
    state: str = "pending"
    """`running` or `requeued`."""
    requeues: int = 0
    """How many attempts the function itself asked for."""
    causes: list[str] = field(default_factory=list)
    """One line for each attempt that failed."""
    announced: list[str] = field(default_factory=list)
    """One line for each attempt that follows a failed one; whoever waits shows them."""
    ending: Ending | None = None
    """How the last attempt ended; None as long as the job goes on."""
    message: str = ""
    """What went wrong in the end, where the files of the ranks do not tell it."""

    @classmethod
    def read(cls, directory: Path) -> Progress:
        """Return how far the job in `directory` has got."""
        found = files.read_json(directory / PROGRESS)
        if not found:
            return cls()
        ending = found.pop("ending")
        return cls(**found, ending=ending and Ending(**ending))

    def write(self, directory: Path) -> None:
        """Keep it."""
        write_private(directory / PROGRESS, json.dumps(asdict(self)).encode())


class Driver:
    """Runs the attempts of a job."""

    def __init__(self, directory: Path, *, in_allocation: bool, is_tied: bool) -> None:
        self._dir = directory
        self._plan = Plan.read(directory)
        self._is_batch = not in_allocation
        self._launcher = os.getppid() if is_tied else None
        self._progress = Progress.read(directory)

    def run(self) -> int:
        """Go on until there is an end; return the exit code of the job."""
        progress = self._progress
        if progress.ending is not None and progress.ending.state == "done":
            return 0  # SLURM starts a job again that ended while it was being pre-empted
        progress.ending, progress.message = None, ""
        while True:
            progress.attempt += 1
            self._note("running")
            command = srun_command(self._dir, self._plan, progress.attempt)
            kind = RemoteSupervisor
            if self._plan.elastic is not None:
                from unisono.launch.places.elastic import ElasticRemoteSupervisor as kind
            supervisor = kind(
                self._dir,
                self._plan,
                progress.attempt,
                command,
                on_tick=self._look_for_launcher,
            )
            ending = supervisor.run()
            if supervisor.mistake:
                return self._end(ending, supervisor.mistake)
            match ending.state:
                case "done" | "cancelled":
                    return self._end(ending)
                case "requeued":
                    if (code := self._requeue(ending)) is not None:
                        return code
                case _:
                    if self._is_taken_away():
                        return 1  # the scheduler knows why, and what comes next
                    if not self._may_try_again(ending):
                        return self._end(ending)

    def _look_for_launcher(self) -> None:
        """The ranks of a launcher that waits for them end with it."""
        if self._launcher is not None and os.getppid() != self._launcher:
            write_private(self._dir / CANCEL, b"")

    def _is_taken_away(self, *, except_for: str = "") -> bool:
        """Whether SLURM is ending this job, for another reason than `except_for`."""
        if not self._is_batch:
            return False
        fields = show_job(os.environ["SLURM_JOB_ID"])
        is_running = fields.get("JobState", "RUNNING") == "RUNNING"
        return not is_running and fields.get("Reason") != except_for

    def _may_try_again(self, ending: Ending) -> bool:
        """Note why it failed, and wait before the next attempt if there is one."""
        causes = self._progress.causes
        line = headline(self._dir, self._plan.ranks, ending)
        causes.append(f"attempt {ending.attempt}: {line}")
        if len(causes) > self._plan.max_restarts or not ending.was_ready:
            return False
        line = announcement(
            line,
            attempts=self._progress.attempt + 1,
            limit=1 + self._plan.max_restarts + self._progress.requeues,
            failures=len(causes),
        )
        self._progress.announced.append(line)
        self._note("running")
        end = time.monotonic() + pause_s(len(causes))
        while time.monotonic() < end:
            if (self._dir / CANCEL).exists():
                return False
            time.sleep(0.1)
        return True

    def _requeue(self, ending: Ending) -> int | None:
        """Have the job started again; return the exit code if this process is to leave."""
        if self._is_taken_away(except_for="TimeLimit"):
            return 0  # somebody cancelled it, or SLURM requeues it by itself
        progress, limit = self._progress, self._plan.max_requeues
        progress.requeues += 1
        if progress.requeues > limit:
            return self._end(ending, too_many_requeues(progress.requeues, limit))
        self._note("requeued")
        if not self._is_batch:
            return None
        job = os.environ["SLURM_JOB_ID"]
        try:
            call("scontrol", "requeue", job)
        except PlatformError as error:
            return self._end(
                ending,
                f"the cluster does not requeue job {job}, which has saved what it needs\n"
                f"  {error}\n"
                f"HINT: sbatch {self._dir / 'job.sh'} goes on from the checkpoint",
            )
        return 0

    def _end(self, ending: Ending, message: str = "") -> int:
        self._progress.ending, self._progress.message = ending, message
        self._progress.write(self._dir)
        return 0 if ending.state == "done" else 1

    def _note(self, state: str) -> None:
        self._progress.state = state
        self._progress.write(self._dir)


def drive(directory: str, *, in_allocation: bool = False, is_tied: bool = False) -> int:
    """Be the driver of the job in `directory`."""
    # Signals are for the ranks, which SLURM tells itself; whoever loaded this function may have
    # other handlers in place.
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT):
        signal.signal(number, lambda *_: None)
    path = Path(directory)
    job_files.check_ours(path)
    return Driver(path, in_allocation=in_allocation, is_tied=is_tied).run()


def drive_for_submitit(directory: str) -> None:
    """Be the driver inside a process of submitit."""
    sys.exit(drive(directory))


if __name__ == "__main__":
    flags = sys.argv[2:]
    sys.exit(
        drive(sys.argv[1], in_allocation="--in-allocation" in flags, is_tied="--tied" in flags)
    )
