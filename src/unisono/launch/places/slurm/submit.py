"""From a checked request to a job in the queue, by submitit, and the handle on it.

`run(on="slurm")` submits, too, then shows the output of task 0 and waits.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.errors import (
    PYTHON,
    JobCancelled,
    MissingExtra,
    PlatformError,
    RankFailed,
    RankTimeout,
    Spelling,
)
from unisono.launch import job_files
from unisono.launch.attempts import (
    Progress,
    own_failure,
    parent_of,
    plan_of,
    rank_job,
    results_of,
    telling,
)
from unisono.launch.job import ENDS, POLL_S, Job, JobState
from unisono.launch.logs import FAILED, LogReader
from unisono.launch.places.agent import Invitation, visit
from unisono.launch.places.agents import LEAVE_S, payload_path
from unisono.launch.places.slurm import cluster
from unisono.launch.places.slurm.task import INVITATION, STATES, SlurmTask, Values
from unisono.launch.pool.payload import Parcel, dump_call, nameless_file
from unisono.launch.pool.protocol import RankState, write_payload
from unisono.launch.pool.stacks import ANSWER_S
from unisono.launch.request import RunRequest
from unisono.launch.results import Results
from unisono.launch.stopping import announce, first_told_to, signals_of_launcher

if TYPE_CHECKING:
    import submitit

LOST_S = 15.0
"""How long files of a job may take to appear after it has left the queue."""
CANCEL_S = 90.0
"""Longest wait for the end of a job that was cancelled."""
STATE = "job.json"
"""What the handle on a job has to know of it."""
_CANCELLED = "cancelled"
"""File of a job that its handle has cancelled: the scheduler forgets it after a while."""
_GOING = ("CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT")
_WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
_ENDS = {
    "CANCELLED": "cancelled",
    "PREEMPTED": "cancelled",
    "TIMEOUT": "timeout",
    "DEADLINE": "timeout",
}
"""States in which a job is over, whatever its files say; all others wait for the files."""
_FIXED = ("requeue", "open_mode", "signal", "signal_delay_s")
"""What a restart after a requeue depends on; no option changes it."""


def warning_s(timeout_min: int | None) -> int:
    """Return how many seconds before the time limit ranks are warned.

    Long enough to save, and a fifth of a short job at most.

    Example:
        >>> warning_s(2), warning_s(60)
        (24, 90)
    """
    return int(max(10, min(90, 0.2 * 60 * timeout_min))) if timeout_min else 90


def submit_job(request: RunRequest) -> SlurmJob:
    """Queue a job; return its handle."""
    return _submit_jobs([request])[0]


def submit_array(requests: Sequence[RunRequest]) -> list[SlurmJob]:
    """Queue one job array of requests that differ in their calls only; return its handles.

    Submitit's files are in one directory, and each job has one of its own below it.
    """
    return _submit_jobs(requests, is_array=True)


def _submit_jobs(requests: Sequence[RunRequest], *, is_array: bool = False) -> list[SlurmJob]:
    request = requests[0]
    platform = request.platform
    _check_submitit(request.spelling)
    cluster.check_programs(request.spelling)
    cluster.check_nodes(platform, request.spelling)
    folder = job_files.make_directory(parent_of(request), platform.name)
    tasks: list[SlurmTask] = []
    try:
        for number, each in enumerate(requests):
            directory = folder / str(number) if is_array else folder
            directory.mkdir(mode=0o700, exist_ok=True)
            # The environment of a rank is that of the cluster's step.
            job = rank_job(each, dump_call(each.fn, each.args, each.kwargs), {})
            plan = plan_of(each)
            write_payload(job, payload_path(directory, plan))
            shown = each.logs.shown(each.ranks)
            tasks.append(SlurmTask(directory, plan, shown, each.logs.prefix and each.ranks > 1))
        ids = _submit(request, folder, tasks)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    entry = {"folder": str(folder), "ranks": request.ranks, "threads": platform.cpus_per_rank}
    for task, job_id in zip(tasks, ids, strict=True):
        state = json.dumps({"id": job_id, **entry}).encode()
        job_files.write_private(task.directory / STATE, state)
    return [SlurmJob(task.directory) for task in tasks]


def _submit(request: RunRequest, folder: Path, tasks: Sequence[SlurmTask]) -> list[str]:
    """Submit tasks with submitit, several of them as an array; return the ids of their jobs."""
    import submitit
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    platform, task = request.platform, tasks[0]
    plan = task.plan
    is_pattern = "%" in str(task.directory)
    if is_pattern or "\n" in f"{platform.name}{task.directory}":
        raise PlatformError.because(
            f"a job named {platform.name!r} in {str(task.directory)!r}",
            "a percent sign, which SLURM replaces" if is_pattern else "a line break",
            None,
            "another name, or logs= with another directory",
        )
    values: dict[str, Any] = {
        "job_name": platform.name,
        "partition": platform.partition if platform.is_explicit("partition") else None,
        "nodes": platform.n_nodes,
        "ntasks_per_node": platform.ranks_per_node,
        "cpus_per_task": platform.cpus_per_rank,
        "gpus_per_node": platform.n_gpus_per_node or None,
        "mem": None if platform.mem_per_node is None else f"{platform.mem_per_node}G",
        "time": platform.timeout_min,
        "array_parallelism": len(tasks),
        "wckey": None,
        "setup": None,
        "teardown": None,
    }
    options: dict[str, Any] = {"no_kill": True} if plan.elastic is not None else {}
    for key, value in (platform.slurm_additional_parameters or {}).items():
        name = key.lstrip("-").replace("-", "_")
        target = values if name in values else options
        if name not in _FIXED:
            target[name] = None if value is False else value
    options = {name: value for name, value in options.items() if value is not None}
    values["setup"] = ["export SUBMITIT_LOG_LEVEL=CRITICAL", *(values["setup"] or ())]
    executor = submitit.SlurmExecutor(folder, max_num_timeout=plan.max_requeues)
    try:
        executor.update_parameters(
            **values,
            signal_delay_s=warning_s(platform.timeout_min),
            srun_args=cluster.srun_options(plan),
            additional_parameters={**options, "requeue": True},
        )
        with executor.batch():
            jobs = [executor.submit(task) for task in tasks]
        return [str(job.job_id) for job in jobs]
    except (FailedJobError, FailedSubmissionError, subprocess.SubprocessError) as error:
        raise PlatformError.because(
            f"a job of {request.ranks} ranks",
            f"sbatch says: {str(error).strip()}",
            None,
            "unisono run --dry-run ... shows the same at once",
        ) from error


def _check_submitit(spelling: Spelling = PYTHON) -> None:
    if importlib.util.find_spec("submitit") is None:
        raise MissingExtra.of("slurm", spelling.options(on="slurm"), "no submitit")


def script_text(request: RunRequest) -> str:
    """Return the batch script that submitit would write; works without a cluster, too.

    Submitit shows a script only where it writes it. So it submits to an `sbatch` that does nothing,
    in a directory that is removed.
    """
    _check_submitit(request.spelling)
    from submitit.core.utils import environment_variables

    directory = parent_of(request) / f"{request.platform.name}-XXXXXXXX"
    task = SlurmTask(directory, plan_of(request), frozenset(), has_prefix=False)
    with tempfile.TemporaryDirectory(prefix="unisono-dry-") as folder:
        for name in ("sbatch", "srun"):
            Path(folder, name).write_text("#!/bin/sh\necho Submitted batch job 0\n")
            Path(folder, name).chmod(0o700)
        with environment_variables(PATH=f"{folder}:{os.environ.get('PATH', os.defpath)}"):
            (job_id,) = _submit(request, Path(folder), [task])
        text = Path(folder, f"{job_id}_submission.sh").read_text(encoding="utf-8")
        return text.replace(folder, shlex.quote(str(directory)))


def judge_script(request: RunRequest) -> str:
    """Have the scheduler judge the script without queueing it; return its words."""
    cluster.check_nodes(request.platform, request.spelling)
    return cluster.call("sbatch", "--test-only", text=script_text(request)).strip()


def run_on_slurm(request: RunRequest) -> Results[Any]:
    """Run a request as a job and return what its ranks returned."""
    platform, is_shown = request.platform, request.logs.console != "none"
    interrupted: list[float] = []
    with telling(platform), signals_of_launcher():
        job = submit_job(request)
        paths = (job.submitit.paths.stdout, sys.stdout), (job.submitit.paths.stderr, sys.stderr)
        logs = [(LogReader(path), stream) for path, stream in paths if is_shown]
        is_over = was_told = False
        try:
            with first_told_to(lambda: interrupted.append(time.monotonic())):
                while not is_over:
                    is_over = job.wait(POLL_S)
                    for log, stream in [*logs]:
                        text, mark, _ = log.new().partition(FAILED)
                        stream.write(text.decode(errors="replace"))
                        stream.flush()
                        if mark:  # behind it is the traceback of an error that is raised here
                            logs.remove((log, stream))
                    if interrupted and not is_over and not was_told:
                        was_told = True
                        if is_shown:
                            announce(platform.interrupt_s)
                        if job.status() != "running" or job.ask("interrupt") is None:
                            raise KeyboardInterrupt
                    limit_s = platform.interrupt_s + platform.grace_s + LEAVE_S
                    if interrupted and time.monotonic() > interrupted[0] + limit_s:
                        raise KeyboardInterrupt
        except BaseException:
            job.cancel()
            raise
        if interrupted:
            raise KeyboardInterrupt from own_failure(job.rank_states(), job.dir, job.attempt)
        return job.result()


class SlurmJob(Job):
    """A job of the scheduler.

    Attributes:
        submitit: the handle of submitit on its task 0.
    """

    submitit: submitit.SlurmJob[Values]

    def __init__(self, directory: Path) -> None:
        """Take the directory of a job, after a look at who wrote it."""
        import submitit

        job_files.check_ours(directory)
        self.dir = directory
        self._entry: dict[str, Any] = job_files.read_json(directory / STATE) or {}
        self.id, self.ranks = str(self._entry["id"]), int(self._entry["ranks"])
        self.submitit = submitit.SlurmJob(self._entry["folder"], self.id)
        self._left_at: float | None = None
        cluster.QUEUE.forget()

    @classmethod
    def find(cls, id_or_dir: str | Path) -> SlurmJob:
        """Return the handle on a job, by its number or its directory."""
        _check_submitit()
        directory = Path(id_or_dir)
        if not (directory / STATE).exists():
            directory = cluster.directory_of_job(str(id_or_dir)) or directory
            if not (directory / STATE).exists():  # that of an array has one for each job
                directory /= str(id_or_dir).partition("_")[2]
        if not (directory / STATE).exists():
            raise PlatformError.because(
                f"Job.attach({str(id_or_dir)!r})",
                "no job of ours that the scheduler remembers, and no directory of one",
                None,
                "the job's directory, below .unisono/jobs of the directory it was submitted from",
            )
        return cls(directory.absolute())

    def wait(self, timeout_s: float | None = None) -> bool:
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.done():
            if end is not None and time.monotonic() >= end:
                return False
            time.sleep(POLL_S)
        return True

    def cancel(self) -> None:
        if not self.done():
            (self.dir / _CANCELLED).touch()
            self.submitit.cancel(check=False)
            cluster.QUEUE.forget()
            self.wait(CANCEL_S)

    def stacks(self) -> dict[int, str]:
        answer = self.ask("stacks") if self.status() == "running" else None
        return answer["stacks"] if answer else {}

    def ask(self, order: str) -> dict[str, Any] | None:
        """Give the supervisor in task 0 an order, and return its answer; None: not reached."""
        entry = job_files.read_json(self.dir / INVITATION)
        return entry and visit(Invitation.read(entry["invitation"]), order, 2 * ANSWER_S)

    def rank_states(self) -> list[RankState]:
        """Return how the ranks ended, of a job that has."""
        job_files.check_ours(self.dir / STATES)
        return pickle.loads((self.dir / STATES).read_bytes())

    def _look(self) -> JobState:
        """Return how it stands; as its reason why it waits, in the scheduler's words."""
        progress = Progress.read(self.dir)
        attempt, ending = max(0, progress.attempt), progress.ending
        if self.submitit.paths.result_pickle.exists():
            if ending is None:
                return JobState("failed", attempt, "the supervisor of its ranks failed")
            name = ending.state if ending.state in ENDS and not progress.message else "failed"
            words = progress.message or (progress.causes or [""])[-1]
            return JobState(name, attempt, "" if name == "done" else words.split("\n")[0])
        state, reason = cluster.QUEUE.look(self.id) or ("", "the scheduler has forgotten it")
        if state in _WAITING:
            return JobState("requeued" if progress.attempt >= 0 else "pending", attempt, reason)
        words = "" if reason == "None" else reason
        if state in _GOING:
            self._left_at = None
            is_requeued = progress.state == "requeued"
            return JobState("requeued" if is_requeued else "running", attempt, words)
        # It is over, but says nothing: its files may be slow.
        self._left_at = self._left_at or time.monotonic()
        if time.monotonic() < self._left_at + (2.0 if state in _ENDS else LOST_S):
            return JobState("running", attempt, words)
        name = "cancelled" if (self.dir / _CANCELLED).exists() else _ENDS.get(state, "failed")
        return JobState(name, attempt, f"{state}: {reason}")

    def _results(self) -> Results[Any]:
        state, progress = self._look(), Progress.read(self.dir)
        if state.name == "cancelled":
            raise JobCancelled(f"job {self.id} was cancelled ({state.reason})", job_id=self.id)
        if progress.ending is None or not self.submitit.paths.result_pickle.exists():
            raise self._error_by_scheduler(state)
        values = self.submitit.result() if state.name == "done" else {}

        def value(rank: int) -> Parcel:
            parcel = Parcel(nameless_file(), is_owner=True)
            for piece in values.pop(rank):
                os.write(parcel.fd, piece)
            return parcel

        return results_of(
            progress,
            self.rank_states(),
            value,
            place="slurm",
            threads=int(self._entry["threads"]),
            job_dir=self.dir,
            is_kept=True,
        )

    def _error_by_scheduler(self, state: JobState) -> RankFailed | RankTimeout:
        """Return the error of a job that ended without a word of its ranks."""
        fields = cluster.show_job(self.id)
        if state.name == "timeout":
            limit = fields.get("TimeLimit", "")
            return RankTimeout(
                f"job {self.id} reached its time limit of {limit} ({state.reason})\n"
                "HINT: a longer timeout_min, or save and requeue when should_stop() says so; "
                f"logs are in {self.dir}"
            )
        code = f", exit code {fields['ExitCode']}" if "ExitCode" in fields else ""
        words = [f"job {self.id} ended without a result ({state.reason}{code})"]
        if self.submitit.paths.result_pickle.exists():
            words.append(str(self.submitit.exception()))
        words.append(
            f"HINT: logs are in {self.dir}; if it has none, nodes do not see it: other logs="
        )
        return RankFailed("\n".join(words), job_dir=str(self.dir), attempt=state.attempt)
