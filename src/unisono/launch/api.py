"""`run`, `submit` and `dry_run`: one function, any number of ranks, their return values back."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from unisono.errors import PlatformError
from unisono.launch.attempts import LauncherAttempts, job_directory, telling
from unisono.launch.in_process import run_here, run_inline
from unisono.launch.job import Job, LocalJob
from unisono.launch.logs import Logs
from unisono.launch.places.slurm.cluster import in_allocation
from unisono.launch.platform import Device, Platform
from unisono.launch.pool.client import get_server, why_not
from unisono.launch.pool.payload import dump_call
from unisono.launch.pool.stacks import own_frames_hidden
from unisono.launch.request import (
    RESERVED,
    RunRequest,
    check_call,
    checked_request,
    function_name,
    is_in_world,
)
from unisono.launch.results import Results
from unisono.launch.settings import say_once
from unisono.launch.stopping import signals_of_launcher

__all__ = ["dry_run", "run", "submit", "submit_array"]

T = TypeVar("T")


def run(
    fn: Callable[..., T],
    /,
    *args: Any,
    on: str | Device | Platform | None = None,
    ranks: int | tuple[int, int] | None = None,
    nodes: int | None = None,
    hosts: Sequence[str] | None = None,
    timeout_s: float | None = None,
    max_restarts: int | None = None,
    logs: str | Path | Logs | None = None,
    seed: int | None = None,
    check: bool | None = None,
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
            `mpiexec` of ours, `"ray"` for actors of a Ray cluster, `"slurm"` for a job of a
            cluster, `"inline"` for this very process as a world of one (where a debugger works and
            exceptions pass as they are), a profile of `unisono.toml`, a `Device` or a `Platform`.
            Default: GPUs if there are any.
        ranks: number of ranks over all nodes; if not given 2 on `"cpu"`, `"mpi"` and `"ray"`, all
            GPUs on `"gpu"`, 1 on `"mps"`, one per node on `"slurm"` and on several nodes. Each rank
            gets cores / ranks threads. `(2, 8)` are the fewest and the most of an elastic job.
        nodes: number of hosts, for `"mpi"`, `"ray"` and `"slurm"`; 1 if not given.
        hosts: names of the hosts for `"mpi"`, as ssh takes them.
        timeout_s: deadline, counted from the moment all ranks are ready.
        max_restarts: how many times to start again after a failure; 0 if not given.
        logs: a directory to keep logs in, or a `Logs`.
        seed: seeds the generators of Python, numpy and torch, on rank r with `seed + r`.
        check: whether ranks look for silent mistakes, as with `UNISONO_CHECK=1`.
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
    options = {name: value for name, value in locals().items() if name in RESERVED}
    with own_frames_hidden():
        check_call(fn, args, kwargs, options)
        del options["record"], options["watch"]
        request = checked_request(fn, args, kwargs, **options)
        if not record and not watch:
            return execute(request)
        # Records live above this layer; only who asks for one has to load them.
        recording = importlib.import_module("unisono.train.recording.launching")
        name = record if isinstance(record, str) else request.name
        return recording.run_recorded(request, name, watch=bool(watch))


def execute(request: RunRequest) -> Results[Any]:
    """Run a checked request to its end, and tell the platform's own functions of it."""
    if request.joins_world:
        return run_here(request)
    if request.decided_by_file:
        say_once(request.decided_by_file)
    if request.place == "slurm" and not in_allocation():
        from unisono.launch.places.slurm.submit import run_on_slurm

        return run_on_slurm(request)
    with telling(request.platform):
        if request.place == "inline":
            return run_inline(request)
        if request.platform.kind.is_here and why_not(request.platform.spawn_method) is None:
            get_server()  # which loads torch while the call is packed, if it has just been started
        call = dump_call(request.fn, request.args, request.kwargs)
        with signals_of_launcher(), job_directory(request) as job_dir:
            return LauncherAttempts(request, call, job_dir).results()


def submit(
    fn: Callable[..., Any],
    /,
    *args: Any,
    on: str | Device | Platform | None = None,
    ranks: int | tuple[int, int] | None = None,
    nodes: int | None = None,
    hosts: Sequence[str] | None = None,
    timeout_s: float | None = None,
    max_restarts: int | None = None,
    logs: str | Path | Logs | None = None,
    seed: int | None = None,
    check: bool | None = None,
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
    options = {name: value for name, value in locals().items() if name in RESERVED}
    return submit_request(_request(fn, args, {**kwargs, **options}))


def submit_array(
    fn: Callable[..., Any], values: Iterable[Any], /, *args: Any, on: str | Platform, **options: Any
) -> list[Job]:
    """Queue `fn(value, *args)` for each value as one job array of SLURM; return the jobs.

    Args:
        fn: any function.
        values: the first argument of each job.
        args: the other positional arguments, alike in all jobs.
        on: `"slurm"`, or a profile or `Platform` of that kind; `"array_parallelism"` in its
            `slurm_additional_parameters` says how many jobs may run at the same time.
        options: keyword arguments of `submit`, and of `fn`.
    """
    requests = [_request(fn, (value, *args), {"on": on, **options}) for value in values]
    name = function_name(fn)
    if not requests:
        raise PlatformError.because(f"submit_array({name}, ...)", "no value", hint="[1, 2, 3]")
    if requests[0].place != "slurm" or in_allocation():
        raise PlatformError.because(
            f"submit_array({name}, ...) with on={requests[0].place!r}",
            "no queue: job arrays are SLURM's",
            hint=f"[unisono.run({name}, value) for value in values]",
        )
    from unisono.launch.places.slurm import submit as slurm

    return [*slurm.submit_array(requests)]


def dry_run(fn: Callable[..., Any], /, *args: Any, **options: Any) -> str:
    """Return a table of the ranks that `submit` would start, and where; starts and writes nothing.

    The parameters are those of `submit`. On `"slurm"` the batch script comes first.

    Example:
        >>> print(dry_run(print, on="cpu", ranks=2).splitlines()[0].strip())
        rank  node              device
    """
    return describe_request(_request(fn, args, options))


def _request(fn: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> RunRequest:
    """Check a call in the background, whose keywords are those of `submit` and of `fn`."""
    names = options.keys() & set(RESERVED) - {"record", "watch"}
    of_run = {name: options[name] for name in names}
    kwargs = {name: value for name, value in options.items() if name not in names}
    check_call(fn, args, kwargs, of_run)
    if not isinstance(logs := of_run.get("logs"), Logs):
        of_run["logs"] = Logs(dir=logs, console="none")
    on = of_run.pop("on", None)
    return checked_request(fn, args, kwargs, on=on, **of_run)


def submit_request(request: RunRequest) -> Job:
    """Start a checked request in the background."""
    if is_in_world() or request.place == "inline":
        raise PlatformError.because(
            f"unisono.submit({request.name}, ...)",
            "a run in this very process, which would end before there is a handle",
            None,
            "unisono.run",
        )
    if request.decided_by_file:
        say_once(request.decided_by_file)
    if request.place == "slurm" and not in_allocation():
        from unisono.launch.places.slurm.submit import submit_job

        return submit_job(request)
    return LocalJob(request)


def describe_request(request: RunRequest) -> str:
    """Return what a checked request would start."""
    table = request.platform.rank_table()
    if request.place != "slurm":
        return table
    from unisono.launch.places.slurm.submit import script_text

    return f"{script_text(request)}\n{table}"
