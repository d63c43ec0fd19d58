"""`submit` and `Job`: a run in the background, and the handle on it."""

from __future__ import annotations

import atexit
import os
import secrets
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, overload

from unisono.errors import JobCancelled, PlatformError, RankFailed, RankTimeout, UnisonoError
from unisono.launch import job_files
from unisono.launch.attempts import Attempts, job_directory
from unisono.launch.conventions import Convention
from unisono.launch.detection import is_in_world
from unisono.launch.device import Device
from unisono.launch.logs import Logs
from unisono.launch.payload import dump_call
from unisono.launch.platform import Platform
from unisono.launch.platform_table import rank_table
from unisono.launch.request import Request, checked_request
from unisono.launch.results import Results
from unisono.launch.run import telling

__all__ = ["Job", "dry_run", "submit"]

POLL_S = 0.1
"""Seconds between two looks at files."""
ENDS = ("done", "failed", "timeout", "cancelled")
"""States that do not change any more."""


class Job(ABC):
    """The handle on a run in the background.

    Attributes:
        id: name of the job.
        dir: its directory, with the logs.
    """

    id: str
    dir: Path

    @staticmethod
    def attach(id_or_dir: str | Path) -> Job:
        """Return the handle again, in whatever process, from the id or the directory."""
        for job in _running:
            if job.id == str(id_or_dir):
                return job
        from unisono.launch.attached_job import attach

        return attach(id_or_dir)

    @property
    @abstractmethod
    def attempt(self) -> int:
        """Number of the present attempt."""

    @property
    @abstractmethod
    def reason(self) -> str:
        """Why it is in its state, in one line."""

    @abstractmethod
    def status(self) -> str:
        """Return `pending`, `running`, `requeued`, `done`, `failed`, `timeout` or `cancelled`."""

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end, whatever it is; return whether it has come in time."""

    @abstractmethod
    def result(self, timeout_s: float | None = None) -> Results[Any]:
        """Wait, and return the results or raise what went wrong (`TimeoutError`: not yet)."""

    @abstractmethod
    def cancel(self) -> None:
        """End all ranks. Safe to repeat."""

    @abstractmethod
    def stacks(self) -> dict[int, str]:
        """Return where every rank stands; nothing if none runs."""

    def done(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self.status() in ENDS

    @overload
    def logs(self, rank: int = 0, *, tail: int | None = None) -> str: ...
    @overload
    def logs(self, rank: int = 0, *, follow: Literal[True]) -> Iterator[str]: ...
    def logs(
        self, rank: int = 0, *, follow: bool = False, tail: int | None = None
    ) -> str | Iterator[str]:
        """Return what a rank has printed, or its lines as they come until the job has ended.

        Args:
            rank: which rank.
            follow: whether to wait for more.
            tail: only so many lines from the end.
        """
        path = self.dir / f"rank-{rank}.log"
        if follow:
            return self._follow(path)
        text = self._log_text(rank)
        return text if tail is None else "".join(text.splitlines(keepends=True)[-tail:])

    def _log_text(self, rank: int) -> str:
        path = self.dir / f"rank-{rank}.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def _follow(self, path: Path) -> Iterator[str]:
        place = 0
        while True:
            is_over = self.done()
            if path.exists():
                with path.open("rb") as file:
                    file.seek(place)
                    data = file.read()
                whole = data if is_over else data[: data.rfind(b"\n") + 1]
                place += len(whole)
                yield from whole.decode(errors="replace").splitlines()
            if is_over:
                return
            time.sleep(POLL_S)

    def __repr__(self) -> str:
        return f"<Job {self.id} {self.status()}>"


class _LocalJob(Job):
    """A run that a thread of this process supervises; its ranks end with this process."""

    def __init__(self, attempts: Attempts, stack: ExitStack) -> None:
        self.id = f"{os.getpid()}-{secrets.token_hex(3)}"
        self.dir = attempts.job_dir
        self._attempts = attempts
        self._attempts.on_state = self._note
        self._stack = stack
        self._state = "pending"
        self._results: Results[Any] | None = None
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"unisono-job-{self.id}", daemon=True
        )

    def start(self) -> None:
        """Begin."""
        self._note("pending")
        _running.add(self)
        self._thread.start()

    @property
    def attempt(self) -> int:
        """Number of the present attempt."""
        return self._attempts.number

    @property
    def reason(self) -> str:
        """The first line of what went wrong, if something did."""
        return str(self._error).splitlines()[0] if self._error else ""

    def status(self) -> str:
        """Return the state in one word."""
        return self._state

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end, whatever it is; return whether it has come in time."""
        return self._ended.wait(timeout_s)

    def result(self, timeout_s: float | None = None) -> Results[Any]:
        """Wait, and return the results or raise what went wrong."""
        if not self.wait(timeout_s):
            raise TimeoutError(f"job {self.id} has not ended within {timeout_s:g} s")
        if self._error is not None:
            raise self._error
        if self._results is None:
            raise RankFailed(f"job {self.id} left no results")
        return self._results

    def cancel(self) -> None:
        """End all ranks, and wait until they have."""
        if not self._ended.is_set():
            self._attempts.cancel()
            self._ended.wait()

    def stacks(self) -> dict[int, str]:
        """Return where every rank stands."""
        return {} if self._ended.is_set() else self._attempts.stacks()

    def _log_text(self, rank: int) -> str:
        return self._results.log(rank) if self._results is not None else super()._log_text(rank)

    def _run(self) -> None:
        end = "failed"
        try:
            with self._stack, telling(self._attempts.request.platform):
                self._results = self._attempts.run()
                end = "done"
        except JobCancelled as error:
            self._error, end = JobCancelled(str(error), job_id=self.id), "cancelled"
        except RankTimeout as error:
            self._error, end = error, "timeout"
        except BaseException as error:
            self._error = error
        finally:
            self._note(end)
            _running.discard(self)
            self._ended.set()

    def _note(self, state: str) -> None:
        self._state = state
        if not self.dir.is_dir():
            return
        if state in ENDS and self._attempts.request.logs.dir is not None:
            outcome = self._results if self._error is None else _plain(self._error)
            job_files.write_outcome(self.dir, outcome)
        job_files.update_state(
            self.dir,
            {
                "id": self.id,
                "name": self._attempts.request.name,
                "ranks": self._attempts.request.ranks,
                "pid": os.getpid(),
                "pid_start": job_files.process_start(os.getpid()),
                "state": state,
                "attempt": self._attempts.number,
                "reason": self.reason,
            },
        )


_running: weakref.WeakSet[_LocalJob] = weakref.WeakSet()


def submit(
    fn: Callable[..., Any],
    /,
    *args: Any,
    on: str | Device | Platform | None = None,
    ranks: int | None = None,
    nodes: int | None = None,
    timeout_s: float | None = None,
    max_restarts: int | None = None,
    logs: str | Path | Logs | None = None,
    **kwargs: Any,
) -> Job:
    """Start what `run` would run, and return at once with a handle on it.

    The parameters are those of `run`. A thread of this process supervises the ranks, and they end
    with it; on `"slurm"` the job is queued, and lives on. Output goes to the logs only, unless
    `logs` says otherwise.

    Example:
        >>> import unisono
        >>> job = unisono.submit(lambda: unisono.world().rank, on="cpu", ranks=2)
        >>> list(job.result())
        [0, 1]
    """
    if logs is None or not isinstance(logs, Logs):
        logs = Logs(dir=logs, console="none")
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
    return submit_request(request)


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
    if request.place == "slurm":
        from unisono.launch.slurm.submission import submit as submit_to_slurm

        return submit_to_slurm(request, convention)
    call = dump_call(request.fn, request.args, request.kwargs)
    stack = ExitStack()
    job_dir = stack.enter_context(job_directory(request))
    attempts = Attempts(request=request, call=call, job_dir=job_dir, convention=convention)
    job = _LocalJob(attempts, stack)
    job.start()
    return job


def dry_run(
    fn: Callable[..., Any],
    /,
    *args: Any,
    on: str | Device | Platform | None = None,
    ranks: int | None = None,
    nodes: int | None = None,
    timeout_s: float | None = None,
    max_restarts: int | None = None,
    logs: str | Path | Logs | None = None,
    **kwargs: Any,
) -> str:
    """Return a table of the ranks that `submit` would start, and where; starts and writes nothing.

    On `"slurm"` the batch script comes first.

    Example:
        >>> print(dry_run(print, on="cpu", ranks=2).splitlines()[0].strip())
        rank  node              device
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
    return describe_request(request)


def describe_request(request: Request) -> str:
    """Return what a checked request would start."""
    import socket

    table = rank_table(request.platform, socket.gethostname())
    if request.place != "slurm":
        return table
    from unisono.launch.slurm.submission import script_text

    return f"{script_text(request)}\n{table}"


def _plain(error: BaseException) -> BaseException:
    """Return an error that another process can read whatever its cause is."""
    if isinstance(error, UnisonoError):
        twin = type(error)(str(error))
        return (
            twin if not isinstance(error, RankFailed) else RankFailed(str(error), rank=error.rank)
        )
    return RankFailed(f"{type(error).__name__}: {error}")


def _end_running_jobs() -> None:
    """The ranks of local jobs end with this process."""
    for job in list(_running):
        job.cancel()


atexit.register(_end_running_jobs)
