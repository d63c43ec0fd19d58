"""`unisono.run`: one function, any number of ranks, their return values back."""

from __future__ import annotations

import pickle
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from unisono.errors import PlatformError, RankFailed, RankTimeout
from unisono.launch.console import Console
from unisono.launch.cores import threads_per_rank, usable_cores
from unisono.launch.existing import is_in_world, run_here
from unisono.launch.interrupts import termination_as_exception
from unisono.launch.local import run_local
from unisono.launch.logs import SHOW_ALL_UP_TO, Logs
from unisono.launch.payload import dump_call
from unisono.launch.rank import Job
from unisono.launch.request import Request, checked_request
from unisono.launch.results import Results
from unisono.launch.supervise import Outcome, tail

__all__ = ["run"]

T = TypeVar("T")

START_TIMEOUT_S = 300.0
COMM_TIMEOUT_S = 600.0


def run(
    fn: Callable[..., T],
    /,
    *args: Any,
    on: str | None = None,
    ranks: int | None = None,
    nodes: int | None = None,
    timeout_s: float | None = None,
    max_restarts: int | None = None,
    logs: str | Path | Logs | None = None,
    **kwargs: Any,
) -> Results[T]:
    """Call `fn(*args, **kwargs)` on every rank and return what each returned, in rank order.

    In a process that is a rank already (torchrun, `unisono run`, another `run`) nothing is
    started: `fn` runs here, as a rank of that world.

    Args:
        fn: any function: of a module, of `__main__`, a closure, a lambda.
        args: its positional arguments.
        on: `"cpu"` for processes of this host (the default), or `"inline"` for this very process
            as a world of one, where a debugger works and exceptions pass as they are.
        ranks: number of ranks; 2 on `"cpu"` if not given. Each rank gets cores / ranks threads.
        nodes: number of hosts; 1.
        timeout_s: deadline, counted from the moment all ranks are ready.
        max_restarts: how many times to start again after a failure; 0 if not given.
        logs: a directory to keep logs in, or a `Logs`.
        kwargs: keyword arguments of `fn`.

    Raises:
        RankFailed: a rank raised or died; all are stopped, the error has that rank's traceback.
        RankTimeout: a deadline passed; the error has the stacks of all ranks.
        PlatformError: the request makes no sense here; nothing was started.

    Example:
        >>> import unisono
        >>> list(unisono.run(lambda: unisono.world().rank, on="cpu", ranks=2))
        [0, 1]
    """
    request = checked_request(
        fn,
        args,
        kwargs,
        on=on,
        ranks=ranks,
        nodes=nodes,
        timeout_s=timeout_s,
        max_restarts=max_restarts,
        logs=logs,
    )
    if is_in_world():
        return run_here(fn, request)
    if request.place == "inline":
        return _run_inline(fn, request)
    call = dump_call(fn, args, kwargs)
    with termination_as_exception(), _job_dir(request) as job_dir:
        return _run_on_cpu(request, call, job_dir)


def _run_inline(fn: Callable[..., T], request: Request) -> Results[T]:
    begin = time.perf_counter()
    value = fn(*request.args, **request.kwargs)
    wall_s = time.perf_counter() - begin
    return Results([value], hosts=[socket.gethostname()], platform="inline", wall_s=wall_s)


def _run_on_cpu(request: Request, call: bytes, job_dir: Path) -> Results[Any]:
    job = Job(
        argv=list(sys.argv),
        call=call,
        start_timeout_s=START_TIMEOUT_S,
        comm_timeout_s=COMM_TIMEOUT_S,
        backend=None,
    )
    shown = request.logs.shown(request.ranks)
    if request.logs.console == "auto" and request.ranks > SHOW_ALL_UP_TO:
        print(
            f"unisono: showing rank 0 of {request.ranks}; all: logs=unisono.Logs(console='all')",
            file=sys.stderr,
        )
    causes: list[str] = []
    while True:
        attempt = len(causes)
        try:
            outcome = run_local(
                job,
                ranks=request.ranks,
                console=Console(shown, prefix=request.logs.prefix and request.ranks > 1),
                job_dir=job_dir,
                timeout_s=request.timeout_s,
                attempt=attempt,
            )
        except (RankFailed, RankTimeout) as error:
            causes.append(f"attempt {attempt}: {str(error).splitlines()[0]}")
            if attempt == request.max_restarts:
                if attempt:
                    error.add_note("\n".join(causes))
                raise
            time.sleep(min(30.0, 2.0**attempt))
        else:
            return _results(outcome, request, job_dir, attempt)


def _results(outcome: Outcome, request: Request, job_dir: Path, attempt: int) -> Results[Any]:
    values: list[Any] = []
    for rank, data in enumerate(outcome.values):
        try:
            values.append(pickle.loads(data))
        except Exception as error:
            raise RankFailed(
                f"what rank {rank} of {request.ranks} returned cannot be unpickled here\n"
                f"{type(error).__name__}: {error}\n"
                "HINT: return numbers, lists, dicts, arrays or tensors",
                rank=rank,
                host=outcome.hosts[rank],
            ) from error
    return Results(
        values,
        hosts=outcome.hosts,
        platform=request.place,
        wall_s=outcome.wall_s,
        start_s=outcome.start_s,
        restarts=attempt,
        threads=threads_per_rank(request.ranks, usable_cores()),
        dir=job_dir if request.logs.dir is not None else None,
        logs={rank: tail(job_dir / f"rank-{rank}.log") for rank in range(request.ranks)},
    )


@contextmanager
def _job_dir(request: Request) -> Iterator[Path]:
    """Yield the private directory of the run; without `logs` only a failure leaves it behind."""
    if request.logs.dir is not None:
        name = "".join(c if c.isalnum() or c in "._-" else "_" for c in request.name)
        path = Path(request.logs.dir).absolute() / f"{name}-{secrets.token_hex(4)}"
        try:
            path.mkdir(parents=True, mode=0o700)
        except OSError as error:
            raise PlatformError.because(
                f"unisono.run(..., logs={str(request.logs.dir)!r})",
                f"{path} cannot be made: {error.strerror}",
                None,
                "a directory of yours",
            ) from error
        yield path
        return
    path = Path(tempfile.mkdtemp(prefix="unisono-"))
    try:
        yield path
    except (RankFailed, RankTimeout):
        raise
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise
    shutil.rmtree(path, ignore_errors=True)
