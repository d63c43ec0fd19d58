"""What submitit runs in every task of a job: task 0 supervises, and each task is an agent.

Task 0 writes an invitation into the job's directory. The other tasks look for it before an attempt,
never during one. Their agents then speak to the supervisor over the channel; that of rank 0 is a
child of task 0.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.errors import PlatformError, RankFailed
from unisono.launch import job_files
from unisono.launch.attempts import LONGEST_PAUSE_S, Attempts, Progress
from unisono.launch.channel import ControlChannel
from unisono.launch.logs import FAILED, Console
from unisono.launch.places.agent import CONNECT_S, GONE, Invitation, attend, chunks_of
from unisono.launch.places.agents import ALL_INTERFACES
from unisono.launch.places.program import ProgramRanks
from unisono.launch.places.slurm import cluster
from unisono.launch.pool.protocol import RankJob, RunPlan, own_versions
from unisono.launch.pool.verdict import Ending, headline

if TYPE_CHECKING:
    from submitit.core.utils import DelayedSubmission

Values = dict[int, list[bytes]]
"""What each rank has returned: a `Parcel`, in pieces."""
INVITATION = "invitation.json"
STATES = "states.pkl"
"""How the ranks of the last attempt ended."""
_POLL_S = 0.1, 1.0
"""Seconds between two looks for an invitation: the first, and the longest."""


def srun_ranks(job: RankJob, plan: RunPlan, attempt: int, **shown: Any) -> ProgramRanks:
    """Return the ranks of a run on the nodes that this process has already."""
    cluster.check_programs()
    command = ["srun", *cluster.srun_options(plan), *_agent_command()]
    shown |= {"env": job.setting.environment, "address": ALL_INTERFACES}
    return ProgramRanks(job, plan, attempt, command=command, **shown)


def _agent_command() -> list[str]:
    return [sys.executable, "-m", "unisono.launch.places.agent"]


class SlurmRanks(ProgramRanks):
    """The ranks of one attempt in a job, whose other tasks are agents.

    Args:
        plan: the plain facts of the run.
        attempt: number of the attempt.
        obey: called with an order of the handle on the job, and the channel for the answer.
        shown: console and directory.
    """

    def __init__(
        self, plan: RunPlan, attempt: int, obey: Callable[[str, ControlChannel], None], **shown: Any
    ) -> None:
        shown |= {"command": _agent_command(), "env": os.environ, "address": ALL_INTERFACES}
        super().__init__(None, plan, attempt, **shown)
        self._obey = obey

    @cached_property
    def invitation(self) -> Invitation:
        """What an agent must know; found without torch, unlike the addresses of all interfaces."""
        node = os.environ.get("SLURMD_NODENAME", "")
        names = [node and cluster.node_address(node), node, socket.gethostname(), "127.0.0.1"]
        addresses = list(dict.fromkeys(name for name in names if name))
        return Invitation(addresses=addresses, port=self._listener.port, key=self._key.hex())

    def start(self) -> None:
        entry = {"start": _start(), "attempt": self._attempt, "invitation": str(self.invitation)}
        job_files.write_private(self._dir / INVITATION, json.dumps(entry).encode())
        super().start()

    def starter_has_ended(self) -> bool:
        """Whether there will be no more agents; never, for each task starts its own."""
        if super().starter_has_ended() and self._seats[0].channel is None:
            summary = f"had no agent: it ended with code {self.exit_code} before it connected"
            self._fail(self._seats[0], summary, hint=f"{self._dir / 'starter.log'} has its words")
        return False

    def visited(self, channel: ControlChannel, order: str) -> None:
        self._obey(order, channel)

    def warn(self) -> None:
        """Tell the ranks that the scheduler will end them soon."""
        if self._plan.stop_signals:
            self._order(signal=self._plan.stop_signals[-1])


class JobAttempts(Attempts):
    """The attempts of a job in one allocation.

    Attributes:
        is_requeued: whether the function asked to be started again, and may.
    """

    def __init__(self, plan: RunPlan, job_dir: Path, console: Console) -> None:
        super().__init__(plan, job_dir, Progress.read(job_dir))
        self.progress.ending, self.progress.message = None, ""
        self.is_requeued = False
        self._console = console
        self._announced = len(self.progress.announced)
        self._is_cancelled = False

    def ranks(self) -> SlurmRanks:
        shown = {"console": self._console, "job_dir": self._job_dir}
        return SlurmRanks(self._plan, self.progress.attempt, self._obey, **shown)

    def warn(self) -> None:
        """Tell the ranks that the scheduler will end them soon; from any thread."""
        supervisor = self._supervisor
        if supervisor is not None and isinstance(supervisor.ranks, SlurmRanks):
            supervisor.ask(supervisor.ranks.warn)

    def be_terminated(self) -> None:
        """At SIGTERM: end all ranks in good order if the scheduler is ending the job."""
        if not self._is_cancelled and self.is_taken_away(is_requeue=True):
            self._is_cancelled = True
            if (supervisor := self._supervisor) is not None:
                supervisor.ask(supervisor.cancel)

    def values(self) -> Values:
        """Return what each rank has returned."""
        if self._supervisor is None:
            return {}
        fds = {s.rank: self._supervisor.ranks.value(s.rank).fd for s in self.states if s.is_good}
        return {r: [piece["value"] for piece in chunks_of("value", fd)] for r, fd in fds.items()}

    def is_cancelled(self) -> bool:
        return self._is_cancelled

    def note(self, state: str) -> None:
        """Keep how far it has got, for a requeued job and for the handle."""
        self.progress.state = state
        self.progress.write(self._job_dir)
        for line in self.progress.announced[self._announced :]:
            self._announced += 1
            if self._console.shows_any:
                print(line, file=sys.stderr, flush=True)

    def is_taken_away(self, *, is_requeue: bool) -> bool:
        """Whether SLURM is ending this job; it knows why, and what comes next."""
        fields = cluster.show_job(cluster.this_job())
        is_running = fields.get("JobState", "RUNNING") == "RUNNING"
        # Before its time limit, the ranks were warned; then it is for us to requeue it.
        return not is_running and not (is_requeue and fields.get("Reason") == "TimeLimit")

    def requeue(self) -> bool:
        self.is_requeued = True
        return False

    def end_without_requeue(self, ending: Ending, error: Exception) -> None:
        """Note that the cluster does not start the job again."""
        job = cluster.this_job()
        text = f"the cluster does not requeue job {job}, which has saved what it needs\n  {error}"
        self._end(ending, f"{text}\nHINT: submit it again, to go on from the checkpoint")

    def _obey(self, order: str, channel: ControlChannel) -> None:
        """Take an order of the handle on the job."""
        if (supervisor := self._supervisor) is None:
            return
        if order == "interrupt":
            supervisor.ask(supervisor.interrupt)
            channel.send({"interrupted": True})
        else:
            supervisor.ask(lambda: channel.send({"stacks": supervisor.ranks.stacks()}))

    def _end(self, ending: Ending, message: str = "") -> Ending:
        # Whether a job that SLURM ends was cancelled, or starts again, SLURM alone can tell.
        return ending if self._is_cancelled else super()._end(ending, message)


class _NotRequeued(Exception):
    """The attempts have ended, and not in a way that calls for another start."""


@dataclass
class SlurmTask:
    """The callable that submitit runs in each task; see the module."""

    directory: Path
    """That of the job, which all nodes see."""
    plan: RunPlan
    shown: frozenset[int]
    """Ranks whose output goes to the output of task 0."""
    has_prefix: bool
    """Whether each line of it begins with the rank."""
    _running: tuple[JobAttempts, Future[Ending]] | None = field(default=None, init=False)

    def __call__(self) -> Values | None:
        """Run the job; return what each rank has returned, in task 0."""
        import submitit

        submitted, here = " with unisono ".join(self.plan.versions), own_versions()
        if [*self.plan.versions] != here:
            raise PlatformError.because(
                f"a job that was submitted by Python {submitted}",
                f"Python {' with unisono '.join(here)} on {socket.gethostname()}",
                None,
                "submit it again",
            )
        job_files.check_ours(self.directory)
        task = submitit.JobEnvironment()
        if task.global_rank:
            _be_agent(self.directory, self.plan)
            return None
        result = task.paths.result_pickle
        if result.exists() and _is_done(self.directory):
            # SLURM starts a job again that ended while it was being pre-empted.
            return submitit.SlurmJob(task.paths.folder, task.job_id).result()
        result.unlink(missing_ok=True)
        console = Console(self.shown, prefix=self.has_prefix)
        attempts = JobAttempts(self.plan, self.directory, console)
        signal.signal(signal.SIGTERM, lambda *_: attempts.be_terminated())
        # In a thread: submitit calls `checkpoint` in the main one, in the midst of what that does.
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(attempts.run)
            self._running = attempts, running
            try:
                running.exception()
                if attempts.is_requeued:  # have submitit call `checkpoint`
                    signal.raise_signal(signal.Signals[f"SIG{task.USR_SIG}"])
            except subprocess.SubprocessError as error:
                attempts.end_without_requeue(running.result(), error)
            except _NotRequeued:
                pass
            running.result()
        return self._outcome(attempts)

    def checkpoint(self) -> DelayedSubmission:
        """Let the ranks save, and return what submitit is to requeue; it calls this at a warning.

        Raises in the midst of `__call__` if there is nothing to requeue.
        """
        from submitit.helpers import DelayedSubmission

        if self._running is not None:
            attempts, running = self._running
            attempts.warn()
            running.exception()  # wait for the end, whatever it is
            if not attempts.is_requeued:
                raise _NotRequeued
        return DelayedSubmission(replace(self))

    def _outcome(self, attempts: JobAttempts) -> Values:
        """Return the values, or raise what went wrong; the handle reads the rest from files."""
        progress = attempts.progress
        if progress.ending is None:
            sys.exit("the scheduler ends this job")
        job_files.write_private(self.directory / STATES, pickle.dumps(attempts.states))
        if progress.ending.state == "done" and not progress.message:
            return attempts.values()
        sys.stderr.write(FAILED.decode())
        words = progress.message or headline(attempts.states, progress.ending)
        raise RankFailed(words, job_dir=str(self.directory), attempt=progress.attempt)


def _start() -> int:
    """Return how many times SLURM has started this job before."""
    return int(os.environ.get("SLURM_RESTART_COUNT") or 0)


def _is_done(directory: Path) -> bool:
    ending = Progress.read(directory).ending
    return ending is not None and ending.state == "done"


def _be_agent(directory: Path, plan: RunPlan) -> None:
    """Be the agent of this task's rank in each attempt, until there are no more."""
    attempt, limit_s = -1, plan.start_timeout_s
    while (entry := _next_invitation(directory, attempt, limit_s)) is not None:
        attempt, limit_s = entry["attempt"], LONGEST_PAUSE_S + CONNECT_S
        try:
            reason = attend(Invitation.read(entry["invitation"]), dict(os.environ))
        except PlatformError as error:  # the attempt ended before this rank had begun
            reason = str(error)
            print(reason, file=sys.stderr, flush=True)
        if not plan.max_restarts or reason in ("", "cancelled", "interrupted", GONE):
            return


def _next_invitation(directory: Path, attempt: int, limit_s: float) -> dict[str, Any] | None:
    """Return the invitation to the attempt after `attempt`; None if there will be no other."""
    end, pause_s = time.monotonic() + limit_s, _POLL_S[0]
    while time.monotonic() < end:
        entry = job_files.read_json(directory / INVITATION)
        if entry is not None and entry["start"] == _start() and entry["attempt"] > attempt:
            return entry
        if _is_done(directory) if attempt < 0 else Progress.read(directory).ending is not None:
            return None
        time.sleep(pause_s)
        pause_s = min(_POLL_S[1], 1.5 * pause_s)
    raise PlatformError.because(
        f"task {os.environ.get('SLURM_PROCID')} of a job waits for its supervisor in task 0",
        f"no invitation in {directory} within {limit_s:g} s",
        None,
        "logs= with a directory that all nodes share",
    )
