"""A run as a series of attempts: a new one after a failure, or when the function asks for it.

`Attempts` runs the series: in the launcher (`LauncherAttempts`), or in task 0 of a job of a
cluster (`places/slurm/task.py`). `Progress` records what came of it.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from unisono.errors import JobCancelled, PlatformError, RankFailed, RankTimeout
from unisono.launch import job_files
from unisono.launch.logs import SHOW_ALL_UP_TO, Console, stdin_rank, tail, warn
from unisono.launch.places.local import LocalRanks
from unisono.launch.platform import Device, Platform
from unisono.launch.pool import cleanup, verdict
from unisono.launch.pool.payload import Parcel, dumps
from unisono.launch.pool.protocol import RankJob, RankState, RunPlan
from unisono.launch.pool.surroundings import Surroundings, common_variables
from unisono.launch.pool.verdict import Ending
from unisono.launch.request import RunRequest
from unisono.launch.results import Results
from unisono.launch.supervisor import Ranks, Supervisor

LONGEST_PAUSE_S = 30.0
"""Longest wait before another attempt."""
PROGRESS = "progress.json"


@dataclass
class Progress:
    """How far a run has got, over all its attempts."""

    attempt: int = -1
    """Number of the present attempt."""
    state: str = "pending"
    """`running` or `requeued`."""
    requeues: int = 0
    """Number of attempts that the function asked for."""
    causes: list[str] = field(default_factory=list)
    """One line for each attempt that failed."""
    announced: list[str] = field(default_factory=list)
    """One line for each attempt that follows a failed one, to be printed by the launcher."""
    ending: Ending | None = None
    """How the last attempt ended; None while the run goes on."""
    message: str = ""
    """What went wrong at the end, if no rank reports it."""

    @classmethod
    def read(cls, directory: Path) -> Progress:
        """Return the progress of the job in `directory`."""
        fields = job_files.read_json(directory / PROGRESS)
        if not fields:
            return cls()
        ending = fields.pop("ending")
        return cls(**fields, ending=ending and Ending(**ending))

    def write(self, directory: Path) -> None:
        """Write it to the directory of the job."""
        job_files.write_private(directory / PROGRESS, json.dumps(asdict(self)).encode())


class Attempts(ABC):
    """A series of attempts.

    Args:
        plan: how many there may be, and their deadlines.
        job_dir: directory of the run.
        progress: of earlier attempts.

    Attributes:
        progress: how far the run has got.
        states: how the ranks of the latest attempt ended.
    """

    announces = False
    """Whether to print what the first Ctrl-C does."""
    size: int | None = None
    """Number of ranks to which an elastic run was resized."""

    def __init__(self, plan: RunPlan, job_dir: Path, progress: Progress) -> None:
        self.progress = progress
        self._plan = plan
        self._job_dir = job_dir
        self._supervisor: Supervisor | None = None
        self.states: list[RankState] = []

    @abstractmethod
    def ranks(self) -> Ranks:
        """Return the ranks of this attempt, which are about to be started."""

    @abstractmethod
    def is_cancelled(self) -> bool:
        """Whether the series has been cancelled."""

    @abstractmethod
    def note(self, state: str) -> None:
        """Record and publish the state of the run."""

    def is_taken_away(self, *, is_requeue: bool) -> bool:
        """Whether the scheduler decides what comes next."""
        del is_requeue
        return False

    def requeue(self) -> bool:
        """Return whether to start the function again here; else the scheduler does.

        Raises `PlatformError` if it refuses.
        """
        return True

    def run(self) -> Ending:
        """Make attempts until the run ends, or the scheduler continues it."""
        progress, plan = self.progress, self._plan
        while True:
            progress.attempt += 1
            self.note("running")
            ranks = self.ranks()
            number, announces = progress.attempt, self.announces
            self._supervisor = Supervisor(ranks, plan, number, announces=announces)
            if self.is_cancelled():
                self._supervisor.cancel()
            if self.size is not None:
                self._supervisor.ask(functools.partial(ranks.policy.resize, self.size))
            ending = self._supervisor.run()
            self.states = ranks.states
            if ending.state in ("done", "cancelled"):
                return self._end(ending)
            if self.is_taken_away(is_requeue=ending.state == "requeued"):
                return ending
            if ending.state == "requeued":
                progress.requeues += 1
                if progress.requeues > plan.max_requeues:
                    return self._end(
                        ending,
                        f"the function asked to be started again {progress.requeues} times\n"
                        f"  {progress.requeues} requeues > max_requeues={plan.max_requeues}\n"
                        "HINT: Platform(max_requeues=...) if that is as it should be",
                    )
                self.note("requeued")
                try:
                    if not self.requeue():
                        return ending
                except PlatformError as error:
                    return self._end(ending, str(error))
            elif not self._may_try_again(ending):
                return self._end(ending)
            if self.is_cancelled():
                return self._end(replace(ending, state="cancelled"))

    def _may_try_again(self, ending: Ending) -> bool:
        """Record why an attempt failed; wait for the next one, and return whether it may begin."""
        progress, plan = self.progress, self._plan
        line = verdict.headline(self.states, ending)
        progress.causes.append(f"attempt {ending.attempt}: {line}")
        failures = len(progress.causes)
        if failures > plan.max_restarts or not ending.was_ready:
            return False
        limit = 1 + plan.max_restarts + progress.requeues
        begin = f"attempt {progress.attempt + 2} of {limit} begins in {pause_s(failures):.0f} s"
        progress.announced.append(f"unisono: {line}; {begin}")
        self.note("running")
        end = time.monotonic() + pause_s(failures)
        while time.monotonic() < end and not self.is_cancelled():
            time.sleep(0.05)
        return True

    def _end(self, ending: Ending, message: str = "") -> Ending:
        self.progress.ending, self.progress.message = ending, message
        self.note(self.progress.state)
        return ending


def pause_s(failures: int) -> float:
    """Return the seconds before the attempt after this number of failed ones: 1, 2, 4, ...

    >>> [pause_s(failures) for failures in (1, 2, 9)]
    [1.0, 2.0, 30.0]
    """
    return min(LONGEST_PAUSE_S, 2.0 ** (failures - 1))


class LauncherAttempts(Attempts):
    """The attempts of a run that its launcher supervises.

    Args:
        request: the checked request.
        call: function and arguments.
        job_dir: directory of the run.
        on_state: called with each new state: `"running"`, `"requeued"`.
    """

    def __init__(
        self,
        request: RunRequest,
        call: Parcel,
        job_dir: Path,
        on_state: Callable[[str], None] | None = None,
    ) -> None:
        logs, ranks = request.logs, request.ranks
        self.request = request
        self._on_state = on_state
        self._cancelled = threading.Event()
        self._announced = 0
        plan = plan_of(request)
        variables = common_variables(os.environ, threads=plan.cpus_per_rank, more=plan.env)
        self._console = Console(
            logs.shown(ranks),
            prefix=logs.prefix and ranks > 1,
            raw_rank=stdin_rank(variables, ranks),
        )
        self.announces = self._console.shows_any
        if (width := self._console.width()) is not None:
            variables |= {"COLUMNS": str(width), "LINES": "24"}
        self._job = rank_job(request, call, variables)
        super().__init__(plan, job_dir, Progress())

    def results(self) -> Results[Any]:
        """Run to the end; return what the ranks returned, or raise what went wrong."""
        request = self.request
        if request.logs.console == "auto" and request.ranks > SHOW_ALL_UP_TO:
            text = f"showing rank 0 of {request.ranks}; all: --console all, or "
            print(f"unisono: {text}logs=unisono.Logs(console='all')", file=sys.stderr)
        ending, supervisor = self.run(), self._supervisor
        if supervisor is None or ending.state == "cancelled":
            if supervisor is not None and supervisor.is_interrupted:
                raise KeyboardInterrupt from own_failure(self.states, self._job_dir, ending.attempt)
            raise JobCancelled(f"the run of {request.name} was cancelled")
        ranks = supervisor.ranks
        try:
            return results_of(
                self.progress,
                self.states,
                ranks.value,
                place=request.place,
                threads=self._plan.cpus_per_rank,
                job_dir=self._job_dir,
                is_kept=is_kept(request),
            )
        except RankFailed as error:
            if remark := ranks.policy.remark:
                error.add_note(remark)
            raise

    def cancel(self) -> None:
        """End the run, from any thread."""
        self._cancelled.set()
        if (supervisor := self._supervisor) is not None:
            supervisor.ask(supervisor.cancel)

    def resize(self, ranks: int) -> None:
        """Change the number of ranks of an elastic run, from any thread."""
        self.size = ranks
        if (supervisor := self._supervisor) is not None:
            supervisor.ask(functools.partial(supervisor.ranks.policy.resize, ranks))

    def stacks(self, timeout_s: float = 5.0) -> dict[int, str]:
        """Return the stacks of all ranks, from any thread; nothing if no rank runs."""
        supervisor = self._supervisor
        answered = threading.Event()
        answer: dict[int, str] = {}

        def look() -> None:
            if supervisor is not None:
                answer.update(supervisor.ranks.stacks())
            answered.set()

        if supervisor is not None:
            supervisor.ask(look)
            answered.wait(timeout_s)
        return answer

    def ranks(self) -> Ranks:
        """Return the ranks of this attempt, which are about to be started."""
        kind = self.request.platform.kind
        if kind is Device.MPI:
            from unisono.launch.places.mpi import MpiRanks as start
        elif kind is Device.RAY:
            from unisono.launch.places.ray import RayRanks as start
        elif kind is Device.SLURM:  # inside an allocation; else task 0 of the job does this
            from unisono.launch.places.slurm.task import srun_ranks as start
        else:
            start = LocalRanks
        attempt = self.progress.attempt
        return start(self._job, self._plan, attempt, console=self._console, job_dir=self._job_dir)

    def is_cancelled(self) -> bool:
        """Whether the run has been cancelled."""
        return self._cancelled.is_set()

    def note(self, state: str) -> None:
        """Record and publish the state of the run."""
        self.progress.state = state
        if self.progress.ending is None and self._on_state is not None:
            self._on_state(state)
        for line in self.progress.announced[self._announced :]:
            self._announced += 1
            if self.request.logs.console != "none":
                print(line, file=sys.stderr, flush=True)


def own_failure(
    states: Sequence[RankState], job_dir: Path, attempt: int
) -> RankFailed | RankTimeout | None:
    """Return the error of an interrupted attempt, if a rank failed for another reason."""
    if not any(verdict.is_own(state) for state in states):
        return None
    return verdict.failure(states, job_dir, attempt)


def results_of(
    progress: Progress,
    states: Sequence[RankState],
    value: Callable[[int], Parcel],
    *,
    place: str,
    threads: int,
    job_dir: Path,
    is_kept: bool,
) -> Results[Any]:
    """Return what the ranks returned, or raise what went wrong.

    Args:
        progress: of the run.
        states: how the ranks ended.
        value: returns the packed return value of a rank.
        place: where they ran, as `on` says it.
        threads: of each rank.
        job_dir: directory of the run.
        is_kept: whether the directory stays.
    """
    ending = progress.ending
    if ending is None or progress.message:
        attempt = progress.attempt
        raise RankFailed(progress.message, job_dir=str(job_dir), attempt=attempt)
    if ending.state != "done":
        error = verdict.judge(states, ending, job_dir)
        if len(progress.causes) > 1:
            error.add_note("\n".join(progress.causes))
        raise error
    values: list[Any] = []
    returned = [state for state in states if state.is_good]  # of an elastic job, some may have died
    for state in returned:
        if state.warning or state.exit_code:
            how = state.warning or verdict.how_ended(state.exit_code, has_returned=True)
            warn(f"rank {state.rank} returned its result, then {how}")
        try:
            parcel = value(state.rank)
            values.append(parcel.load())
            parcel.close()
        except PlatformError:
            raise
        except Exception as error:
            raise RankFailed(
                f"what rank {state.rank} of {len(states)} returned cannot be unpickled here\n"
                f"{type(error).__name__}: {error}\n"
                "HINT: return numbers, lists, dicts, arrays or tensors",
                rank=state.rank,
                host=state.place,
            ) from error
    return Results(
        values,
        hosts=[state.place for state in returned],
        platform=place,
        wall_s=ending.wall_s,
        start_s=ending.start_s,
        restarts=ending.attempt,
        threads=threads,
        dir=job_dir if is_kept else None,
        logs=[tail(job_dir / f"rank-{state.rank}.log") for state in returned],
        numbers=[state.rank for state in returned],
    )


def plan_of(request: RunRequest) -> RunPlan:
    """Return the plan of a checked request."""
    elastic, stall_s = request.elastic, request.platform.comm_timeout_s
    return RunPlan.of(
        request.platform,
        timeout_s=request.timeout_s,
        max_restarts=request.max_restarts,
        elastic=elastic and {"least": elastic.least, "stall_s": stall_s},
    )


def rank_job(request: RunRequest, call: Parcel, variables: Mapping[str, str]) -> RankJob:
    """Return the job of the ranks; functions that the launcher calls stay here.

    Args:
        request: the checked request.
        call: function and arguments.
        variables: environment of the ranks.
    """
    platform, upon_finish = request.platform, None
    if platform.kind is Device.SLURM and platform.upon_finish is not None:
        upon_finish = dumps(platform.upon_finish)
    is_per_rank = platform.seed_per_rank in (None, True)
    return RankJob(
        argv=list(sys.argv),
        call=call,
        platform=platform.but(upon_finish=None, upon_error=None, seed_per_rank=is_per_rank),
        setting=Surroundings.now(variables),
        upon_finish=upon_finish,
        is_script=request.is_script,
        preload=request.preload,
    )


def parent_of(request: RunRequest) -> Path:
    """Return the parent of directories that stay, or that hosts share."""
    return Path(request.logs.dir or request.platform.console_logs).absolute()


def is_kept(request: RunRequest) -> bool:
    """Whether the directory of a run stays when it has succeeded."""
    return request.logs.dir is not None or request.platform.kind is Device.SLURM


@contextmanager
def job_directory(request: RunRequest) -> Iterator[Path]:
    """Yield the private directory of the run; it is removed on success, unless it is kept."""
    if is_kept(request):
        yield job_files.make_directory(parent_of(request), request.name)
        return
    parent: Path | None = None
    if request.platform.kind is Device.MPI and request.platform.n_nodes > 1:
        parent = parent_of(request)
        parent.mkdir(parents=True, exist_ok=True)
    path = cleanup.make_temporary_directory(parent)
    try:
        yield path
    except (RankFailed, RankTimeout):
        cleanup.keep_directory(path)
        raise
    except BaseException as error:
        # An interrupt has a cause where a rank failed after it.
        if isinstance(error.__cause__, (RankFailed, RankTimeout)):
            cleanup.keep_directory(path)
        else:
            shutil.rmtree(path, ignore_errors=True)
        raise
    shutil.rmtree(path, ignore_errors=True)


@contextmanager
def telling(platform: Platform) -> Iterator[None]:
    """Call `upon_finish` after the block (on a cluster rank 0 does), or `upon_error`."""
    try:
        yield
    except BaseException as error:
        if platform.upon_error is not None:
            platform.upon_error(error)
        raise
    if platform.upon_finish is not None and platform.kind is not Device.SLURM:
        platform.upon_finish()
