"""From a checked request to a job in the queue: its directory, its files, its submission."""

from __future__ import annotations

import importlib.util
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import cloudpickle

from unisono.errors import MissingExtra, PlatformError
from unisono.launch import job_files, registry
from unisono.launch.attempts import travelling
from unisono.launch.conventions import Convention
from unisono.launch.local import write_payload
from unisono.launch.payload import dump_call
from unisono.launch.platform import Platform
from unisono.launch.pool.protocol import Job as RankJob
from unisono.launch.pool.remote import PAYLOAD
from unisono.launch.remote_plan import Plan
from unisono.launch.request import Request
from unisono.launch.setting import Setting
from unisono.launch.slurm import commands
from unisono.launch.slurm.cluster_checks import (
    check_cluster,
    check_programs,
    choose_partition,
)
from unisono.launch.slurm.job import SlurmJob
from unisono.launch.slurm.script import batch_script, directives, driver_command

SCRIPT = "job.sh"
OUTPUT = "slurm.log"
_SPECIAL_STEPS = 0xFFFFFFFA
"""Steps from this number on are no steps of the user's, as the shell of `salloc`."""


def submit(request: Request, convention: Convention, *, is_tied: bool = False) -> SlurmJob:
    """Queue a job, or start it at once inside an allocation; return its handle.

    Args:
        request: what is asked.
        convention: how ranks call the function.
        is_tied: whether a job inside an allocation ends with this process.
    """
    platform = request.platform
    if in_allocation():
        check_programs()
        partition = None
    else:
        partition = check_cluster(platform)
    rank_job = _rank_job(request, convention)
    directory = job_files.make_directory(
        _parent(request),
        platform.name,
        asked=f"the directory of a job below {_parent(request)}",
        hint="logs= with a directory of yours that all nodes share",
    )
    plan = Plan.of(
        platform,
        run_id=secrets.token_hex(8),
        timeout_s=request.timeout_s,
        max_restarts=request.max_restarts,
        words=tuple(platform.srun_args),
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
    write_payload(rank_job, directory / PAYLOAD)
    if in_allocation():
        return _start_here(directory, entry, is_tied=is_tied)
    options = directives(platform, directory / OUTPUT, partition=partition)
    script = batch_script(options, driver_command(directory))
    job_files.write_private(directory / SCRIPT, script.encode())
    if submitter(platform) == "submitit":
        from unisono.launch.slurm.with_submitit import submit_script

        job_id = submit_script(directory, options)
    else:
        job_id = _sbatch(directory / SCRIPT)
    job_files.write_state(directory, {**entry, "id": job_id})
    registry.remember(job_id, directory)
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
        known = commands.partitions(timeout_s=10.0)
    except PlatformError:  # no cluster here: what the caller said must do
        partition = platform.partition if platform.is_explicit("partition") else None
    else:
        partition = choose_partition(platform, known)
    options = directives(platform, directory / OUTPUT, partition=partition)
    return batch_script(options, driver_command(directory))


def judge_script(request: Request) -> str:
    """Have the scheduler judge the script without queueing it; return its words."""
    check_cluster(request.platform)
    done = subprocess.run(
        ["sbatch", "--test-only"],
        input=script_text(request),
        capture_output=True,
        text=True,
        timeout=commands.ANSWER_S,
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


def _rank_job(request: Request, convention: Convention) -> RankJob:
    finish = request.platform.upon_finish
    return RankJob(
        argv=list(sys.argv),
        call=dump_call(request.fn, request.args, request.kwargs),
        convention=convention,
        platform=travelling(request.platform),
        setting=Setting.now({}),  # the environment of a rank is that of the cluster's step
        upon_finish=None if finish is None else cloudpickle.dumps(finish),
        is_script=request.is_script,
    )


def _sbatch(script: Path) -> str:
    done = subprocess.run(
        ["sbatch", "--parsable", str(script)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=commands.ANSWER_S,
        check=False,
    )
    if done.returncode:
        raise refused(script, done.stderr)
    return done.stdout.strip().partition(";")[0]


def refused(script: Path, words: str) -> Exception:
    """Return the error for a script that the scheduler does not take."""
    return PlatformError.because(
        f"sbatch {script}", words.strip(), None, "unisono run --check ... shows the same at once"
    )


def _start_here(directory: Path, entry: dict[str, Any], *, is_tied: bool) -> SlurmJob:
    """Start the driver as a process of this host."""
    flags = ["--in-allocation", *(["--tied"] if is_tied else [])]
    output = os.open(directory / OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "unisono.launch.slurm.driver", str(directory), *flags],
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
    registry.remember(directory.name, directory)
    return SlurmJob(directory, process)
