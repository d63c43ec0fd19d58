"""`submit` and `Job`: a run in the background, and the handle on it."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, overload

from unisono.errors import PlatformError
from unisono.launch.configuration import say_what_file_decides
from unisono.launch.conventions import Convention
from unisono.launch.detection import is_in_world
from unisono.launch.device import Device
from unisono.launch.logs import Logs
from unisono.launch.platform import Platform
from unisono.launch.platform_table import rank_table
from unisono.launch.request import Request, check_names, checked_request
from unisono.launch.results import Results

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
        from unisono.launch.attached_job import attach
        from unisono.launch.local_job import running_job

        return running_job(id_or_dir) or attach(id_or_dir)

    @property
    @abstractmethod
    def ranks(self) -> int:
        """Number of ranks."""

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
        if not 0 <= rank < self.ranks:
            raise PlatformError.because(
                f"the log of rank {rank}",
                f"job {self.id} has {self.ranks} rank{'s' if self.ranks > 1 else ''}",
                f"ranks of a world of {self.ranks} are 0 to {self.ranks - 1}",
                f"rank={self.ranks - 1}",
            )
        if follow:
            return self._follow(self.dir / f"rank-{rank}.log")
        text = self._log_text(rank)
        if tail is None:
            return text
        lines = text.splitlines(keepends=True)
        return "".join(lines[max(0, len(lines) - tail) :])

    def _log_text(self, rank: int) -> str:
        path = self.dir / f"rank-{rank}.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def _follow(self, path: Path) -> Iterator[str]:
        place = 0
        while True:
            is_over = self.done()
            if path.exists():
                if path.stat().st_size < place:  # it was full, and a new one has begun
                    place = 0
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
    seed: int | None = None,
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
    check_names(
        fn,
        args,
        on=on,
        ranks=ranks,
        nodes=nodes,
        timeout_s=timeout_s,
        max_restarts=max_restarts,
        logs=logs,
        seed=seed,
    )
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
        seed=seed,
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
    say_what_file_decides(request.decided_by_file)
    if request.place == "slurm":
        from unisono.launch.slurm.submission import submit as submit_to_slurm

        return submit_to_slurm(request, convention)
    from unisono.launch.local_job import start_local_job

    return start_local_job(request, convention)


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
    seed: int | None = None,
    **kwargs: Any,
) -> str:
    """Return a table of the ranks that `submit` would start, and where; starts and writes nothing.

    On `"slurm"` the batch script comes first.

    Example:
        >>> print(dry_run(print, on="cpu", ranks=2).splitlines()[0].strip())
        rank  node              device
    """
    check_names(
        fn,
        args,
        on=on,
        ranks=ranks,
        nodes=nodes,
        timeout_s=timeout_s,
        max_restarts=max_restarts,
        logs=logs,
        seed=seed,
    )
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
        seed=seed,
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
