"""A run as a series of attempts: a new one after a failure, or when the function asks for it.

On a cluster the same series is run by the driver of the job (`places/slurm/driver.py`).
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from unisono.errors import JobCancelled, RankFailed, RankTimeout
from unisono.launch import job_files
from unisono.launch.console import Console, stdin_rank
from unisono.launch.logs import SHOW_ALL_UP_TO, tail
from unisono.launch.places.local import run_local
from unisono.launch.places.remote import RemoteSupervisor
from unisono.launch.platform import Device, Platform
from unisono.launch.pool import cleanup
from unisono.launch.pool.monitor import Outcome, Supervisor
from unisono.launch.pool.payload import Parcel
from unisono.launch.pool.protocol import Job as RankJob
from unisono.launch.pool.surroundings import Surroundings, common_variables
from unisono.launch.request import Request
from unisono.launch.results import Results

LONGEST_PAUSE_S = 30.0
"""Longest wait before another attempt."""


class Attempts:
    """One run: what was asked, where it stands, and how to reach it from another thread.

    Args:
        request: what was asked.
        job_dir: directory of the run.
        call: function and arguments.
        on_state: told of each change: `"running"`, `"requeued"`.

    Attributes:
        number: number of the present attempt.
    """

    def __init__(
        self,
        request: Request,
        call: Parcel,
        job_dir: Path,
        on_state: Callable[[str], None] = lambda _state: None,
    ) -> None:
        self.request = request
        self.number = 0
        self._call = call
        self._job_dir = job_dir
        self._on_state = on_state
        self._supervisor: Supervisor | RemoteSupervisor | None = None
        self._cancelled = threading.Event()

    def run(self) -> Results[Any]:
        """Try until an attempt succeeds, or there are no more."""
        request, logs = self.request, self.request.logs
        threads, more = request.platform.cpus_per_rank, request.platform.env
        console = Console(
            logs.shown(request.ranks),
            prefix=logs.prefix and request.ranks > 1,
            raw_rank=stdin_rank(os.environ, request.ranks),
        )
        if logs.console == "auto" and request.ranks > SHOW_ALL_UP_TO:
            print(
                f"unisono: showing rank 0 of {request.ranks}; all: --console all, or "
                "logs=unisono.Logs(console='all')",
                file=sys.stderr,
            )
        if request.elastic is not None:  # MKL takes the same way through a sum at any address
            more = {"MKL_CBWR": "AUTO", **(more or {})}
        variables = common_variables(os.environ, threads=threads, more=more)
        if (width := console.width()) is not None:
            variables |= {"COLUMNS": str(width), "LINES": "24"}
        job = rank_job(request, self._call, variables)
        run_attempt = _attempt_at(request.platform.kind)
        if request.elastic is not None:
            run_attempt = functools.partial(run_local, elastic=request.elastic)
            if request.elastic.host is not None:
                job = replace(job, secret=bytes.fromhex(request.elastic.host.secret))
        causes: list[str] = []
        requeues = 0
        while True:
            self._on_state("running")
            try:
                outcome = run_attempt(
                    job,
                    console=console,
                    job_dir=self._job_dir,
                    timeout_s=request.timeout_s,
                    attempt=self.number,
                    on_start=self._supervised_by,
                )
            except (RankFailed, RankTimeout) as error:
                causes.append(f"attempt {self.number}: {str(error).splitlines()[0]}")
                was_ready = self._supervisor is not None and self._supervisor.was_ready
                if len(causes) > request.max_restarts or not was_ready:
                    if len(causes) > 1:
                        error.add_note("\n".join(causes))
                    raise
                pause = pause_s(len(causes))
                if logs.console != "none":
                    limit = 1 + request.max_restarts + requeues
                    attempts, failures = self.number + 1, len(causes)
                    print(
                        announcement(str(error), attempts=attempts, limit=limit, failures=failures),
                        file=sys.stderr,
                        flush=True,
                    )
            else:
                if not outcome.is_requeued:
                    return results_of(
                        outcome,
                        place=request.place,
                        threads=threads,
                        attempt=self.number,
                        job_dir=self._job_dir,
                        is_kept=logs.dir is not None,
                    )
                self._on_state("requeued")
                requeues += 1
                if requeues > (limit := request.platform.max_requeues):
                    raise RankFailed(
                        too_many_requeues(requeues, limit),
                        job_dir=str(self._job_dir),
                        attempt=self.number,
                    )
                pause = 0.0
            self._cancelled.wait(pause)
            self._check_cancelled()
            self.number += 1

    def cancel(self) -> None:
        """End the run, from any thread."""
        self._cancelled.set()
        if self._supervisor is not None:
            self._supervisor.ask(self._check_cancelled)

    def stacks(self, timeout_s: float = 5.0) -> dict[int, str]:
        """Return where all ranks stand, from any thread; nothing if no rank runs."""
        supervisor = self._supervisor
        answered = threading.Event()
        answer: dict[int, str] = {}

        def look() -> None:
            if supervisor is not None:
                answer.update(supervisor.stacks())
            answered.set()

        if supervisor is not None:
            supervisor.ask(look)
            answered.wait(timeout_s)
        return answer

    def _supervised_by(self, supervisor: Supervisor | RemoteSupervisor) -> None:
        self._supervisor = supervisor
        self._check_cancelled()

    def _check_cancelled(self) -> None:
        if self._cancelled.is_set():
            raise JobCancelled(f"the run of {self.request.name} was cancelled")


def pause_s(failures: int) -> float:
    """Return the seconds before the attempt that follows so many failed ones: 1, 2, 4, ...

    >>> [pause_s(failures) for failures in (1, 2, 9)]
    [1.0, 2.0, 30.0]
    """
    return min(LONGEST_PAUSE_S, 2.0 ** (failures - 1))


def announcement(cause: str, *, attempts: int, limit: int, failures: int) -> str:
    """Return the line that says why there is another attempt, and when.

    Args:
        cause: what went wrong.
        attempts: how many there were, the failed one included.
        limit: how many there may be.
        failures: how many of them failed.
    """
    begin = f"attempt {attempts + 1} of {limit} begins in {pause_s(failures):.0f} s"
    return f"unisono: {cause.splitlines()[0]}; {begin}"


def too_many_requeues(requeues: int, limit: int) -> str:
    """Return the message for a function that asks to be started again and again."""
    return (
        f"the function asked to be started again {requeues} times\n"
        f"  {requeues} requeues > max_requeues={limit}\n"
        "HINT: Platform(max_requeues=...) if that is as it should be"
    )


def rank_job(
    request: Request,
    call: Parcel,
    variables: Mapping[str, str],
    *,
    upon_finish: bytes | None = None,
) -> RankJob:
    """Return what ranks are told; functions that belong to the launcher do not travel.

    Args:
        request: what was asked.
        call: function and arguments.
        variables: environment of the ranks.
        upon_finish: function, pickled, for rank 0 to call at the end.
    """
    is_per_rank = request.platform.seed_per_rank in (None, True)
    return RankJob(
        argv=list(sys.argv),
        call=call,
        convention=request.convention,
        platform=request.platform.but(upon_finish=None, upon_error=None, seed_per_rank=is_per_rank),
        setting=Surroundings.now(variables),
        upon_finish=upon_finish,
        is_script=request.is_script,
    )


def _attempt_at(kind: Device) -> Callable[..., Outcome]:
    """Return how ranks of this kind of place are started."""
    if kind is Device.MPI:
        from unisono.launch.places.mpi import run_mpi as run_attempt
    elif kind is Device.SSH:
        from unisono.launch.places.ssh import run_ssh as run_attempt
    elif kind is Device.RAY:
        from unisono.launch.places.ray import run_ray as run_attempt
    else:
        return run_local
    return run_attempt


@contextmanager
def job_directory(request: Request) -> Iterator[Path]:
    """Yield the private directory of the run; without `logs` only a failure leaves it behind."""
    if request.logs.dir is not None:
        path = job_files.make_directory(
            request.logs.dir,
            request.name,
            asked=f"unisono.run(..., logs={str(request.logs.dir)!r})",
            hint="a directory of yours",
        )
        yield path
        return
    parent: Path | None = None
    platform = request.platform
    if platform.kind is Device.MPI and platform.n_nodes > 1:
        # Hosts share the working directory, if anything.
        parent = Path(platform.console_logs).absolute()
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


def results_of(
    outcome: Outcome, *, place: str, threads: int, attempt: int, job_dir: Path, is_kept: bool
) -> Results[Any]:
    """Return what the ranks of a successful attempt returned.

    Args:
        outcome: their values, still pickled.
        place: where they ran, as `on` says it.
        threads: of each rank.
        attempt: number of the attempt.
        job_dir: directory of the run.
        is_kept: whether it stays.
    """
    values: list[Any] = []
    for rank, data in enumerate(outcome.values):
        try:
            values.append(data.load())
            data.close()
        except Exception as error:
            raise RankFailed(
                f"what rank {rank} of {len(outcome.values)} returned cannot be unpickled here\n"
                f"{type(error).__name__}: {error}\n"
                "HINT: return numbers, lists, dicts, arrays or tensors",
                rank=rank,
                host=outcome.hosts[rank],
            ) from error
    return Results(
        values,
        hosts=outcome.hosts,
        platform=place,
        wall_s=outcome.wall_s,
        start_s=outcome.start_s,
        restarts=attempt,
        threads=threads,
        dir=job_dir if is_kept else None,
        logs={rank: tail(job_dir / f"rank-{rank}.log") for rank in range(len(values))},
    )


@contextmanager
def telling(platform: Platform) -> Iterator[None]:
    """Call `upon_finish` after the block, or `upon_error` with what it raised."""
    try:
        yield
    except BaseException as error:
        if platform.upon_error is not None:
            platform.upon_error(error)
        raise
    if platform.upon_finish is not None:
        platform.upon_finish()
