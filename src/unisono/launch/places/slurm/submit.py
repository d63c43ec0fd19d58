"""From a checked request to a job in the queue: its directory, its files, its submission.

`run(on="slurm")` submits, too, then shows the logs and waits.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cloudpickle

from unisono.errors import MissingExtra, PlatformError
from unisono.launch import job_files
from unisono.launch.attempts import own_failure, rank_job, telling
from unisono.launch.console import Console
from unisono.launch.logs import LogFollower
from unisono.launch.places.mailbox import INTERRUPT, PAYLOAD, Plan, read_states
from unisono.launch.places.program import LEAVE_S
from unisono.launch.places.slurm import cluster
from unisono.launch.places.slurm.cluster import check_cluster, check_programs, choose_partition
from unisono.launch.places.slurm.driver import drive_for_submitit
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
_SPECIAL_STEPS = 0xFFFFFFFA
"""Steps from this number on are no steps of the user's, as the shell of `salloc`."""


def submit_job(request: Request, *, is_tied: bool = False) -> SlurmJob:
    """Queue a job, or start it at once inside an allocation; return its handle.

    Args:
        request: what is asked.
        is_tied: whether a job inside an allocation ends with this process.
    """
    platform = request.platform
    if in_allocation():
        check_programs()
        partition = None
    else:
        partition = check_cluster(platform)
    finish, elastic = platform.upon_finish, request.elastic
    job = rank_job(
        request,
        dump_call(request.fn, request.args, request.kwargs),
        {},  # the environment of a rank is that of the cluster's step
        upon_finish=None if finish is None else cloudpickle.dumps(finish),
    )
    directory = job_files.make_directory(
        _parent(request),
        platform.name,
        asked=f"the directory of a job below {_parent(request)}",
        hint="logs= with a directory of yours that all nodes share",
    )
    plan = Plan.of(
        platform,
        timeout_s=request.timeout_s,
        max_restarts=request.max_restarts,
        elastic=None
        if elastic is None
        else {
            "least": elastic.least,
            "stall_s": platform.comm_timeout_s,
            "secret": job.secret.hex(),
        },
    )
    entry: dict[str, Any] = {
        "kind": "slurm",
        "id": None,
        "name": request.name,
        "submitted": time.time(),
        "ranks": request.ranks,
        "threads": platform.cpus_per_rank,
        "plan": plan.as_json(),
    }
    job_files.write_state(directory, entry)
    write_payload(job, directory / PAYLOAD)
    if in_allocation():
        return _start_here(directory, entry, is_tied=is_tied)
    options = _options(request, directory, partition)
    script = batch_script(options, driver_command(directory))
    job_files.write_private(directory / SCRIPT, script.encode())
    submit = _submit_by_submitit if submitter(platform) == "submitit" else _submit_by_sbatch
    job_id = submit(directory, options)
    job_files.write_state(directory, {**entry, "id": job_id})
    job_files.remember(job_id, directory)
    return SlurmJob(directory)


def in_allocation() -> bool:
    """Whether this process has nodes already: inside `salloc` or a batch script, in no step."""
    step = os.environ.get("SLURM_STEP_ID", str(_SPECIAL_STEPS))
    return "SLURM_JOB_ID" in os.environ and step.isdigit() and int(step) >= _SPECIAL_STEPS


def script_text(request: Request) -> str:
    """Return the batch script of a request as it would be sent; works without a cluster, too."""
    platform = request.platform
    directory = _parent(request) / f"{platform.name}-XXXXXXXX"
    try:
        known = cluster.partitions(timeout_s=10.0)
    except PlatformError:  # no cluster here: what the caller said must do
        partition = platform.partition if platform.is_explicit("partition") else None
    else:
        partition = choose_partition(platform, known)
    return batch_script(_options(request, directory, partition), driver_command(directory))


def _options(request: Request, directory: Path, partition: str | None) -> dict[str, str]:
    is_elastic = request.elastic is not None
    output = directory / OUTPUT
    return directives(request.platform, output, partition=partition, is_elastic=is_elastic)


def judge_script(request: Request) -> str:
    """Have the scheduler judge the script without queueing it; return its words."""
    check_cluster(request.platform)
    done = subprocess.run(
        ["sbatch", "--test-only"],
        input=script_text(request),
        capture_output=True,
        text=True,
        timeout=cluster.ANSWER_S,
        check=False,
    )
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


def _parent(request: Request) -> Path:
    return Path(request.logs.dir or request.platform.console_logs).absolute()


def _submit_by_sbatch(directory: Path, _options: Mapping[str, str]) -> str:
    """Submit the script in `directory`; return the id of the job."""
    done = subprocess.run(
        ["sbatch", "--parsable", str(directory / SCRIPT)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=cluster.ANSWER_S,
        check=False,
    )
    if done.returncode:
        raise _refused(directory, done.stderr)
    return done.stdout.strip().partition(";")[0]


def _submit_by_submitit(directory: Path, options: Mapping[str, str]) -> str:
    """Submit the driver of the job in `directory` with submitit; return the id of the job."""
    import submitit
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    class Executor(submitit.SlurmExecutor):
        """Writes the same script as without submitit, but for the command."""

        def _make_submission_file_text(self, command: str, uid: str) -> str:
            del uid
            return batch_script(options, "export SUBMITIT_EXECUTOR=slurm", f"exec {command}")

    (directory / SUBMITIT).mkdir(mode=0o700)
    try:
        job = Executor(folder=directory / SUBMITIT).submit(drive_for_submitit, str(directory))
    except (FailedJobError, FailedSubmissionError, subprocess.SubprocessError) as error:
        raise _refused(directory, str(error)) from error
    return str(job.job_id)


def _refused(directory: Path, words: str) -> Exception:
    """Return the error for a script that the scheduler does not take."""
    return PlatformError.because(
        f"sbatch {directory / SCRIPT}",
        words.strip(),
        None,
        "unisono run --check ... shows the same at once",
    )


def _start_here(directory: Path, entry: dict[str, Any], *, is_tied: bool) -> SlurmJob:
    """Start the driver as a process of this host."""
    flags = ["--in-allocation", *(["--tied"] if is_tied else [])]
    output = os.open(directory / OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "unisono.launch.places.slurm.driver", str(directory), *flags],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    finally:
        os.close(output)
    start = job_files.process_start(process.pid)
    own = {"id": directory.name, "pid": process.pid, "pid_start": start}
    job_files.write_state(directory, {**entry, **own})
    job_files.remember(directory.name, directory)
    return SlurmJob(directory, process)


def run_on_slurm(request: Request) -> Results[Any]:
    """Run a request as a job and return what its ranks returned."""
    logs, shown = request.logs, request.logs.shown(request.ranks)
    console = Console(shown, prefix=logs.prefix and request.ranks > 1)
    platform = request.platform.but(upon_finish=None)  # that is for rank 0
    with telling(platform), signals_of_launcher():
        job = submit_job(request, is_tied=True)
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
            states = read_states(job.dir, job.ranks, job.attempt)
            raise KeyboardInterrupt from own_failure(states, job.dir, job.attempt)
        return job.result()


def _interrupt(job: SlurmJob, platform: Platform, *, is_shown: bool) -> None:
    """Have the ranks of a job save and end; one that has none yet is cancelled."""
    if job.status() != "running":
        raise KeyboardInterrupt
    if is_shown:
        announce(platform.interrupt_s)
    job_files.write_private(job.dir / INTERRUPT, b"")
