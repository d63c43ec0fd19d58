"""From a checked request to a job in the queue, by submitit, and the handle on it.

`run(on="slurm")` submits, too, then shows the output of task 0 and waits.
"""

from __future__ import annotations

import os
import pickle
import select
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.errors import JobCancelled, MissingExtra, PlatformError, RankFailed, RankTimeout
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
from unisono.launch.channel import Channel, dial
from unisono.launch.job import ENDS, POLL_S, Job, State
from unisono.launch.logs import LogReader
from unisono.launch.places.agent import Invitation
from unisono.launch.places.agents import LEAVE_S, payload_path
from unisono.launch.places.slurm import cluster
from unisono.launch.places.slurm.task import INVITATION, STATES, SlurmTask
from unisono.launch.pool.payload import Parcel, dump_call, nameless_file
from unisono.launch.pool.protocol import write_payload
from unisono.launch.pool.stacks import ANSWER_S
from unisono.launch.request import Request
from unisono.launch.results import Results
from unisono.launch.stopping import announce, first_told_to, signals_of_launcher

if TYPE_CHECKING:
    import submitit

LOST_S = 15.0
"""How long files of a job may take to appear after it has left the queue."""
CANCEL_S = 90.0
_DIAL_S = 5.0
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
_OF_SUBMITIT = ("setup", "teardown", "stderr_to_stdout")
"""Parameters of submitit that are no options of `sbatch`."""
_ONLY_READS = '#!/bin/sh\necho "Submitted batch job 0"\n'


def warning_s(timeout_min: int | None) -> int:
    """Return how many seconds before the time limit ranks are warned.

    Long enough to save, and a fifth of a short job at most.

    Example:
        >>> warning_s(2), warning_s(60)
        (24, 90)
    """
    return 90 if not timeout_min else int(max(10, min(90, 0.2 * 60 * timeout_min)))


def submit_job(request: Request) -> SlurmJob:
    """Queue a job; return its handle."""
    _check_submitit()
    partition, minutes = cluster.check_cluster(request.platform)
    # The environment of a rank is that of the cluster's step.
    job = rank_job(request, dump_call(request.fn, request.args, request.kwargs), {})
    plan = plan_of(request, job.secret)
    directory = job_files.make_directory(parent_of(request), request.platform.name)
    try:
        _check_name(request.platform.name, directory)
        write_payload(job, payload_path(directory, plan))
        shown = request.logs.shown(request.ranks)
        task = SlurmTask(directory, plan, shown, request.logs.prefix and request.ranks > 1)
        job_id = _submit(request, directory, task, partition, minutes)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    entry = {"id": job_id, "name": request.name, "submitted": time.time(), "ranks": request.ranks}
    job_files.write_state(directory, {**entry, "threads": plan.cpus_per_rank})
    return SlurmJob(directory)


def _submit(
    request: Request, folder: Path, task: SlurmTask, partition: str | None, minutes: int | None
) -> str:
    """Submit a task with submitit; return the id of the job."""
    import submitit
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    platform, plan = request.platform, task.plan
    values: dict[str, Any] = {
        "job_name": platform.name,
        "partition": partition,
        "nodes": platform.n_nodes,
        "ntasks_per_node": platform.ranks_per_node,
        "cpus_per_task": platform.cpus_per_rank,
        "gpus_per_node": platform.n_gpus_per_node or None,
        "mem": None if platform.mem_per_node is None else f"{platform.mem_per_node}G",
        "time": minutes,
    }
    more: dict[str, Any] = {}
    for name, value in (platform.slurm_additional_parameters or {}).items():
        name = name.lstrip("-").replace("-", "_")
        if name in _FIXED:
            continue
        if name in values or name in _OF_SUBMITIT or value in (None, False):
            values[name] = None if value is False else value
        else:
            more[name] = value
    if plan.elastic is not None:
        more["no_kill"] = True
    setup = ["export SUBMITIT_LOG_LEVEL=CRITICAL", *(values.pop("setup", None) or ())]
    executor = submitit.SlurmExecutor(folder, max_num_timeout=plan.max_requeues)
    try:
        executor.update_parameters(
            **values,
            setup=setup,
            signal_delay_s=warning_s(minutes),
            srun_args=cluster.srun_options(plan),
            additional_parameters={**more, "requeue": True},
        )
        return str(executor.submit(task).job_id)
    except (FailedJobError, FailedSubmissionError, subprocess.SubprocessError) as error:
        raise PlatformError.because(
            f"a job of {request.ranks} ranks",
            f"sbatch says: {str(error).strip()}",
            None,
            "unisono run --check ... shows the same at once",
        ) from error


def _check_submitit() -> None:
    try:
        import submitit  # noqa: F401
    except ImportError:
        raise MissingExtra.of("slurm", 'on="slurm"', "no submitit") from None


def _check_name(name: str, directory: Path) -> None:
    """Raise `PlatformError` if a name cannot stand in a batch script of submitit."""
    for text, argument in ((name, "name"), (str(directory), "logs")):
        if "\n" in text or (argument == "logs" and "%" in text):
            raise PlatformError.because(
                f"a job in {text!r}" if argument == "logs" else f"a job named {text!r}",
                "a line break" if "\n" in text else "a percent sign, which SLURM replaces",
                None,
                f"another {argument}=",
            )


def script_text(request: Request) -> str:
    """Return the batch script that submitit would write; works without a cluster, too.

    Submitit shows a script only where it writes it. So it submits to an `sbatch` that does nothing,
    in a directory that is removed.
    """
    _check_submitit()
    platform = request.platform
    try:
        chosen = cluster.choose_partition(platform, cluster.partitions(timeout_s=10.0))
    except PlatformError:
        if not cluster.missing_programs():
            raise
        # No cluster here: what the caller said must do.
        partition = platform.partition if platform.is_explicit("partition") else None
        chosen = partition, platform.timeout_min
    directory = parent_of(request) / f"{platform.name}-XXXXXXXX"
    _check_name(platform.name, directory)
    with _sbatch_that_does_nothing() as folder:
        task = SlurmTask(directory, plan_of(request, b""), frozenset(), has_prefix=False)
        job_id = _submit(request, folder, task, *chosen)
        text = (folder / f"{job_id}_submission.sh").read_text(encoding="utf-8")
        return text.replace(str(folder), shlex.quote(str(directory)))


@contextmanager
def _sbatch_that_does_nothing() -> Iterator[Path]:
    """Put programs on PATH that queue nothing; yield a folder for submitit."""
    before = os.environ.get("PATH")
    with tempfile.TemporaryDirectory(prefix="unisono-dry-") as folder:
        for name in ("sbatch", "srun"):
            program = Path(folder, name)
            program.write_text(_ONLY_READS)
            program.chmod(0o700)
        os.environ["PATH"] = f"{folder}:{before or os.defpath}"
        try:
            yield Path(folder)
        finally:
            if before is None:
                del os.environ["PATH"]
            else:
                os.environ["PATH"] = before


def judge_script(request: Request) -> str:
    """Have the scheduler judge the script without queueing it; return its words."""
    cluster.check_cluster(request.platform)
    done = cluster.answer("sbatch", "--test-only", text=script_text(request))
    words = done.stderr.strip() or done.stdout.strip()
    if done.returncode:
        raise PlatformError.because(f"sbatch --test-only with {request.ranks} ranks", words)
    return words


def run_on_slurm(request: Request) -> Results[Any]:
    """Run a request as a job and return what its ranks returned."""
    platform, is_shown = request.platform, request.logs.console != "none"
    with telling(platform), signals_of_launcher():
        job = submit_job(request)
        paths = job.submitit.paths
        files = ((LogReader(paths.stdout, tracebacks=False), sys.stdout),)
        files += ((LogReader(paths.stderr, tracebacks=False), sys.stderr),)
        interrupted: list[float] = []
        was_told = False
        try:
            with first_told_to(lambda: interrupted.append(time.monotonic())):
                while True:
                    is_over = job.done()
                    for log, stream in files if is_shown else ():
                        for data in log.new():
                            stream.write(data.decode(errors="replace"))
                            stream.flush()
                    if is_over:
                        break
                    if interrupted and not was_told:
                        was_told = True
                        if is_shown:
                            announce(platform.interrupt_s)
                        if job.status() != "running" or job.ask("interrupt", 0.0) is None:
                            raise KeyboardInterrupt
                    limit_s = platform.interrupt_s + platform.grace_s + LEAVE_S
                    if interrupted and time.monotonic() > interrupted[0] + limit_s:
                        raise KeyboardInterrupt
                    time.sleep(POLL_S)
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

    submitit: submitit.SlurmJob[dict[int, bytes]]

    def __init__(self, directory: Path) -> None:
        import submitit

        job_files.check_ours(directory)
        self.dir = directory
        self._entry = job_files.read_state(directory)
        self.id, self.ranks = str(self._entry["id"]), int(self._entry["ranks"])
        self.submitit = submitit.SlurmJob(directory, self.id)
        self._left_at: float | None = None
        self._end_by_scheduler: tuple[str, str] | None = None
        cluster.QUEUE.forget()

    @classmethod
    def find(cls, id_or_dir: str | Path) -> SlurmJob:
        """Return the handle on a job, by its number or its directory."""
        _check_submitit()
        directory = Path(id_or_dir)
        if not (directory / job_files.STATE).exists():
            directory = cluster.directory_of_job(str(id_or_dir)) or directory
        if not (directory / job_files.STATE).exists():
            raise PlatformError.because(
                f"Job.attach({str(id_or_dir)!r})",
                "no job that the scheduler remembers, and no directory of one",
                None,
                "the job's directory, below .unisono/jobs of the directory it was submitted from",
            )
        return cls(directory.absolute())

    def wait(self, timeout_s: float | None = None) -> bool:
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.done():
            if end is not None and time.monotonic() > end:
                return False
            time.sleep(POLL_S)
        return True

    def cancel(self) -> None:
        if not self.done():
            self.submitit.cancel(check=False)
            cluster.QUEUE.forget()
            self.wait(CANCEL_S)

    def stacks(self) -> dict[int, str]:
        answer = self.ask("stacks", ANSWER_S + _DIAL_S) if self.status() == "running" else None
        return answer["stacks"] if answer else {}

    def ask(self, order: str, timeout_s: float) -> dict[str, Any] | None:
        """Give the supervisor an order, and wait so long for its answer; None: not reached."""
        entry = job_files.read_json(self.dir / INVITATION)
        if entry is None:
            return None
        invitation, channel = Invitation.read(entry["invitation"]), Channel()
        end = time.monotonic() + timeout_s
        try:
            where = invitation.addresses, invitation.port
            channel.attach(dial(channel, bytes.fromhex(invitation.key), *where, _DIAL_S))
            channel.send({"order": order})
            while not channel.is_drained or time.monotonic() < end:
                select.select([channel], [], [], 1.0)
                for message in channel.receive():
                    return message
        except OSError:
            return None
        finally:
            channel.detach()
        return {}

    def rank_states(self) -> Any:
        """Return how the ranks ended, of a job that has."""
        job_files.check_ours(self.dir / STATES)
        return pickle.loads((self.dir / STATES).read_bytes())

    def _look(self) -> State:
        """Return how it stands; as its reason why it waits, in the scheduler's words."""
        progress = Progress.read(self.dir)
        attempt, ending = max(0, progress.attempt), progress.ending
        if self.submitit.paths.result_pickle.exists():
            if ending is None:
                words = str(self.submitit.exception()).strip().splitlines()
                return State("failed", attempt, next(filter(None, words), ""))
            name = ending.state if ending.state in ENDS and not progress.message else "failed"
            words = progress.message or (progress.causes or [""])[-1]
            return State(name, attempt, "" if name == "done" else words.split("\n")[0])
        if self._end_by_scheduler is not None:
            return State(self._end_by_scheduler[0], attempt, self._end_by_scheduler[1])
        state, reason = cluster.QUEUE.look(self.id) or ("", "the scheduler has forgotten it")
        words = "" if reason == "None" else reason
        if state in _WAITING:
            return State("requeued" if progress.attempt >= 0 else "pending", attempt, words)
        if state in _GOING:
            self._left_at = None
            is_requeued = progress.state == "requeued"
            return State("requeued" if is_requeued else "running", attempt, words)
        # It is over, but says nothing: its files may be slow.
        self._left_at = self._left_at or time.monotonic()
        if time.monotonic() < self._left_at + (2.0 if state in _ENDS else LOST_S):
            return State("running", attempt, f"{state}: {reason}")
        self._end_by_scheduler = (_ENDS.get(state, "failed"), f"{state}: {reason}")
        return State(self._end_by_scheduler[0], attempt, self._end_by_scheduler[1])

    def _results(self) -> Results[Any]:
        state, progress = self._look(), Progress.read(self.dir)
        if state.name == "cancelled":
            raise JobCancelled(f"job {self.id} was cancelled ({state.reason})", job_id=self.id)
        if progress.ending is None or not self.submitit.paths.result_pickle.exists():
            raise self._error_by_scheduler(state)
        values = self.submitit.result() if state.name == "done" else {}

        def value(rank: int) -> Parcel:
            fd = nameless_file()
            with suppress(IndexError), open(fd, "wb", closefd=False) as file:
                file.write(values[rank])
            return Parcel(fd, is_owner=True)

        return results_of(
            progress,
            self.rank_states(),
            value,
            place="slurm",
            threads=int(self._entry["threads"]),
            job_dir=self.dir,
            is_kept=True,
        )

    def _error_by_scheduler(self, state: State) -> RankFailed | RankTimeout:
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
        return RankFailed(
            f"job {self.id} ended without a result ({state.reason}{code})\n"
            f"{self.submitit.exception() if self.submitit.paths.result_pickle.exists() else ''}\n"
            f"HINT: logs are in {self.dir}; logs= with a directory that all nodes see, if they do "
            "not see that",
            job_dir=str(self.dir),
            attempt=state.attempt,
        )
