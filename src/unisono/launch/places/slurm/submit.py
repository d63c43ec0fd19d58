"""From a checked request to a job in the queue: its directory, its files, its submission.

`run(on="slurm")` submits, too, then shows the logs and waits.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from unisono.errors import MissingExtra, PlatformError
from unisono.launch import job_files
from unisono.launch.attempts import own_failure, parent_of, plan_of, rank_job, telling
from unisono.launch.logs import Console, LogFollower
from unisono.launch.places.mailbox import INTERRUPT, PAYLOAD, Mailbox
from unisono.launch.places.program import LEAVE_S
from unisono.launch.places.slurm import cluster
from unisono.launch.places.slurm.cluster import check_cluster, choose_partition
from unisono.launch.places.slurm.driver import drive
from unisono.launch.places.slurm.job import SlurmJob
from unisono.launch.places.slurm.script import batch_script, directives, driver_command
from unisono.launch.platform import Platform
from unisono.launch.pool.payload import dump_call
from unisono.launch.pool.protocol import write_payload
from unisono.launch.request import Request
from unisono.launch.results import Results
from unisono.launch.stopping import announce, first_told_to, signals_of_launcher

SCRIPT = "job.sh"
OUTPUT = "slurm.log"
SUBMITIT = "submitit"
"""Where submitit keeps its files, in the directory of the job."""
_PAUSE_S = 0.05


def submit_job(request: Request) -> SlurmJob:
    """Queue a job; return its handle."""
    platform = request.platform
    partition = check_cluster(platform)
    # The environment of a rank is that of the cluster's step.
    job = rank_job(request, dump_call(request.fn, request.args, request.kwargs), {})
    directory = job_files.make_directory(parent_of(request), platform.name)
    entry: dict[str, Any] = {
        "kind": "slurm",
        "id": None,
        "name": request.name,
        "submitted": time.time(),
        "ranks": request.ranks,
        "plan": asdict(plan_of(request, job.secret)),
    }
    job_files.write_state(directory, entry)
    write_payload(job, directory / PAYLOAD)
    script = _script(request, directory, partition)
    job_files.write_private(directory / SCRIPT, script.encode())
    submit = _submit_by_submitit if submitter(platform) == "submitit" else _submit_by_sbatch
    job_id = submit(directory, script)
    job_files.write_state(directory, {**entry, "id": job_id})
    job_files.remember(job_id, directory)
    return SlurmJob(directory)


def script_text(request: Request) -> str:
    """Return the batch script of a request as it would be sent; works without a cluster, too."""
    platform = request.platform
    directory = parent_of(request) / f"{platform.name}-XXXXXXXX"
    try:
        known = cluster.partitions(timeout_s=10.0)
    except PlatformError:  # no cluster here: what the caller said must do
        partition = platform.partition if platform.is_explicit("partition") else None
    else:
        partition = choose_partition(platform, known)
    return _script(request, directory, partition)


def _script(request: Request, directory: Path, partition: str | None) -> str:
    output, is_elastic = directory / OUTPUT, request.elastic is not None
    options = directives(request.platform, output, partition=partition, is_elastic=is_elastic)
    return batch_script(options, driver_command(directory))


def judge_script(request: Request) -> str:
    """Have the scheduler judge the script without queueing it; return its words."""
    check_cluster(request.platform)
    done = cluster.answer("sbatch", "--test-only", text=script_text(request))
    words = done.stderr.strip() or done.stdout.strip()
    if done.returncode:
        raise PlatformError.because(f"sbatch --test-only with {request.ranks} ranks", words)
    return words


def submitter(platform: Platform) -> str:
    """Return who submits the job: `submitit` if it is there and nothing else is asked for."""
    is_there = importlib.util.find_spec("submitit") is not None
    if platform.submitter == "submitit" and not is_there:
        raise MissingExtra.of("slurm", 'Platform(submitter="submitit")', "no submitit")
    return "submitit" if is_there and platform.submitter != "sbatch" else "sbatch"


def _submit_by_sbatch(directory: Path, _script: str) -> str:
    """Submit the script in `directory`; return the id of the job."""
    done = cluster.answer("sbatch", "--parsable", str(directory / SCRIPT))
    if done.returncode:
        raise _refused(directory, done.stderr)
    return done.stdout.strip().partition(";")[0]


def _submit_by_submitit(directory: Path, script: str) -> str:
    """Submit the same script with submitit; return the id of the job."""
    import submitit
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    class Executor(submitit.SlurmExecutor):
        def _make_submission_file_text(self, command: str, uid: str) -> str:
            del command, uid
            return script

    (directory / SUBMITIT).mkdir(mode=0o700)
    try:
        job = Executor(folder=directory / SUBMITIT).submit(drive, str(directory))
    except (FailedJobError, FailedSubmissionError, subprocess.SubprocessError) as error:
        raise _refused(directory, str(error)) from error
    return str(job.job_id)


def _refused(directory: Path, words: str) -> Exception:
    """Return the error for a script that the scheduler does not take."""
    return PlatformError.because(
        f"sbatch {directory / SCRIPT}",
        words.strip(),
        None,
        "unisono run --dry-run ... shows the same at once",
    )


def run_on_slurm(request: Request) -> Results[Any]:
    """Run a request as a job and return what its ranks returned."""
    logs, shown = request.logs, request.logs.shown(request.ranks)
    console = Console(shown, prefix=logs.prefix and request.ranks > 1)
    platform = request.platform
    with telling(platform), signals_of_launcher():
        job = submit_job(request)
        follower = LogFollower(job.dir, console, shown)
        told = 0
        interrupted: list[float] = []
        try:
            with first_told_to(lambda: interrupted.append(time.monotonic())):
                while not job.done():
                    follower.look()
                    for line in job.announcements()[told:]:
                        told += 1
                        if logs.console != "none":
                            print(line, file=sys.stderr, flush=True)
                    if interrupted and not (job.dir / INTERRUPT).exists():
                        _interrupt(job, platform, is_shown=logs.console != "none")
                    limit_s = platform.interrupt_s + platform.grace_s + LEAVE_S
                    if interrupted and time.monotonic() > interrupted[0] + limit_s:
                        raise KeyboardInterrupt
                    time.sleep(_PAUSE_S)
        except BaseException:
            job.cancel()
            raise
        finally:
            follower.close()
        if interrupted:
            states = Mailbox(job.dir, job.attempt).read_states(job.ranks)
            raise KeyboardInterrupt from own_failure(states, job.dir, job.attempt)
        return job.result()


def _interrupt(job: SlurmJob, platform: Platform, *, is_shown: bool) -> None:
    """Have the ranks of a job save and end; one that has none yet is cancelled."""
    if job.status() != "running":
        raise KeyboardInterrupt
    if is_shown:
        announce(platform.interrupt_s)
    job_files.write_private(job.dir / INTERRUPT, b"")
