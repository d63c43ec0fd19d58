"""`run`, `submit` and `dry_run`: one function, any number of ranks, their return values back."""

from __future__ import annotations

import importlib
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from unisono.errors import PlatformError, RankFailed, Requeue
from unisono.launch import stopping
from unisono.launch.attempts import Attempts, job_directory, telling
from unisono.launch.context import seeded
from unisono.launch.conventions import Convention
from unisono.launch.devices import Device
from unisono.launch.existing import run_here
from unisono.launch.job import Job, LocalJob
from unisono.launch.logs import Logs
from unisono.launch.payload import dump_call
from unisono.launch.platform import Platform
from unisono.launch.pool.client import prepare
from unisono.launch.request import Request, check_names, checked_request, is_in_world
from unisono.launch.results import Results
from unisono.launch.settings import say_what_file_decides
from unisono.launch.stacks import own_frames_hidden
from unisono.launch.stopping import signals_of_launcher

__all__ = ["dry_run", "run", "submit"]

T = TypeVar("T")

_ALONE = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",  # whoever listens there gets a free port
    "UNISONO_DETECT": "0",  # still nobody's rank
}
"""With these a script can initialise torch.distributed in a process on its own."""


def run(
    fn: Callable[..., T],
    /,
    *args: Any,
    on: str | Device | Platform | None = None,
    ranks: int | tuple[int, int] | None = None,
    nodes: int | None = None,
    timeout_s: float | None = None,
    max_restarts: int | None = None,
    logs: str | Path | Logs | None = None,
    seed: int | None = None,
    record: str | bool | None = None,
    watch: bool | None = None,
    elastic: bool | None = None,
    **kwargs: Any,
) -> Results[T]:
    """Call `fn(*args, **kwargs)` on every rank and return what each returned, in rank order.

    In a process that is a rank already (torchrun, mpiexec, srun, another `run`) nothing is
    started: `fn` runs here, as a rank of that world.

    Args:
        fn: any function: of a module, of `__main__`, a closure, a lambda.
        args: its positional arguments.
        on: `"cpu"`, `"gpu"`, `"mps"` for processes of this host, `"mpi"` for ranks under an
            `mpiexec` of ours, `"slurm"` for a job of a cluster, `"inline"` for this very process
            as a world of one (where a debugger works and exceptions pass as they are), a profile
            of `unisono.toml`, a `Device` or a `Platform`. Default: GPUs if there are any.
        ranks: number of ranks over all nodes; if not given 2 on `"cpu"` and `"mpi"`, all GPUs on
            `"gpu"`, 1 on `"mps"`, one a node on `"slurm"`. Each rank gets cores / ranks threads.
            `(2, 8)` are the fewest and the most of an elastic job.
        nodes: number of hosts, for `"mpi"` and `"slurm"`; 1 if not given.
        timeout_s: deadline, counted from the moment all ranks are ready.
        max_restarts: how many times to start again after a failure; 0 if not given.
        logs: a directory to keep logs in, or a `Logs`.
        seed: seeds the generators of Python, numpy and torch, on rank r with `seed + r`.
        record: name of a record: `runs/NAME` gets metrics, traces and a report, which is also
            `results.report`; True takes the function's name.
        watch: serve a page that shows the run while it lasts, and record it; in a notebook the
            page appears below the cell.
        elastic: whether ranks may die and join while `unisono.train.elastic` trains; the dead are
            replaced.
        kwargs: keyword arguments of `fn`; one that `run` has, too, goes into a
            `functools.partial(fn, ...)`.

    Raises:
        RankFailed: a rank raised or died; all are stopped, the error has that rank's traceback.
        RankTimeout: a deadline passed; the error has the stacks of all ranks.
        PlatformError: the request makes no sense here; nothing was started.

    Example:
        >>> import unisono
        >>> list(unisono.run(lambda: unisono.world().rank, on="cpu", ranks=2))
        [0, 1]
    """
    given: dict[str, Any] = {
        "on": on,
        "ranks": ranks,
        "nodes": nodes,
        "timeout_s": timeout_s,
        "max_restarts": max_restarts,
        "logs": logs,
        "seed": seed,
        "elastic": elastic,
    }
    with own_frames_hidden():
        check_names(fn, args, **given, record=record, watch=watch)
        request = checked_request(fn, args, kwargs, **given)
        if not record and not watch:
            return execute(request, Convention())
        # Records live above this layer; only who asks for one has to load them.
        recording = importlib.import_module("unisono.train.recording.launching")
        name = record if isinstance(record, str) else request.name
        return recording.run_recorded(request, name, watch=bool(watch))


def execute(request: Request, convention: Convention) -> Results[Any]:
    """Run a checked request to its end, and tell the platform's own functions of it."""
    if request.joins_world:
        return run_here(request, convention)
    say_what_file_decides(request.decided_by_file)
    if request.place == "slurm":
        from unisono.launch.places.slurm.submit import run_on_slurm

        return run_on_slurm(request, convention)
    with telling(request.platform):
        if request.place == "inline":
            return _run_inline(request)
        if request.platform.kind is not Device.MPI:
            prepare(request.platform.spawn_method)
        call = dump_call(request.fn, request.args, request.kwargs)
        with signals_of_launcher(), job_directory(request) as job_dir:
            return Attempts(
                request=request, call=call, job_dir=job_dir, convention=convention
            ).run()


def _run_inline(request: Request) -> Results[Any]:
    """Call the function here; `requeue` in it calls it again."""
    own = {"UNISONO_RESTART": "0", **(_ALONE if request.is_script else {})}
    before = {name: os.environ.get(name) for name in own}
    os.environ |= own
    begin = time.perf_counter()
    try:
        for attempt in range(request.platform.max_requeues + 1):
            os.environ["UNISONO_RESTART"] = str(attempt)
            stopping.forget_request()
            try:
                with seeded(request.seed, 0):
                    value = request.fn(*request.args, **request.kwargs)
            except Requeue:
                continue
            return Results(
                [value],
                hosts=[socket.gethostname()],
                platform="inline",
                wall_s=time.perf_counter() - begin,
                restarts=attempt,
            )
    finally:
        stopping.forget_request()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
    limit = request.platform.max_requeues
    raise RankFailed(f"the function asked to be started again more than max_requeues={limit} times")


def submit(
    fn: Callable[..., Any],
    /,
    *args: Any,
    on: str | Device | Platform | None = None,
    ranks: int | tuple[int, int] | None = None,
    nodes: int | None = None,
    timeout_s: float | None = None,
    max_restarts: int | None = None,
    logs: str | Path | Logs | None = None,
    seed: int | None = None,
    elastic: bool | None = None,
    **kwargs: Any,
) -> Job:
    """Start what `run` would run, and return at once with a handle on it.

    The parameters are those of `run`, but for `record` and `watch`. A thread of this process
    supervises the ranks, and they end with it; on `"slurm"` the job is queued, and lives on. Output
    goes to the logs only, unless `logs` says otherwise.

    Example:
        >>> import unisono
        >>> job = unisono.submit(lambda: unisono.world().rank, on="cpu", ranks=2)
        >>> list(job.result())
        [0, 1]
    """
    given: dict[str, Any] = {
        "on": on,
        "ranks": ranks,
        "nodes": nodes,
        "timeout_s": timeout_s,
        "max_restarts": max_restarts,
        "logs": logs,
        "seed": seed,
        "elastic": elastic,
    }
    check_names(fn, args, **given)
    if not isinstance(logs, Logs):
        given["logs"] = Logs(dir=logs, console="none")
    return submit_request(checked_request(fn, args, kwargs, **given))


def submit_request(request: Request, convention: Convention | None = None) -> Job:
    """Start a checked request in the background."""
    convention = convention or Convention()
    if is_in_world() or request.place == "inline":
        raise PlatformError.because(
            f"unisono.submit({request.name}, ...)",
            "a run in this very process, which leaves nobody to hold the handle",
            None,
            "unisono.run",
        )
    say_what_file_decides(request.decided_by_file)
    if request.place == "slurm":
        from unisono.launch.places.slurm.submit import submit_job

        return submit_job(request, convention)
    return LocalJob(request, convention)


def dry_run(
    fn: Callable[..., Any],
    /,
    *args: Any,
    on: str | Device | Platform | None = None,
    ranks: int | tuple[int, int] | None = None,
    nodes: int | None = None,
    timeout_s: float | None = None,
    max_restarts: int | None = None,
    logs: str | Path | Logs | None = None,
    seed: int | None = None,
    elastic: bool | None = None,
    **kwargs: Any,
) -> str:
    """Return a table of the ranks that `submit` would start, and where; starts and writes nothing.

    On `"slurm"` the batch script comes first.

    Example:
        >>> print(dry_run(print, on="cpu", ranks=2).splitlines()[0].strip())
        rank  node              device
    """
    given: dict[str, Any] = {
        "on": on,
        "ranks": ranks,
        "nodes": nodes,
        "timeout_s": timeout_s,
        "max_restarts": max_restarts,
        "logs": logs,
        "seed": seed,
        "elastic": elastic,
    }
    check_names(fn, args, **given)
    return describe_request(checked_request(fn, args, kwargs, **given))


def describe_request(request: Request) -> str:
    """Return what a checked request would start."""
    table = request.platform.rank_table()
    if request.place != "slurm":
        return table
    from unisono.launch.places.slurm.submit import script_text

    return f"{script_text(request)}\n{table}"
