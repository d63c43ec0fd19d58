"""`Job`: the handle on a run in the background, which is known by the files of its directory.

Whoever supervises the ranks writes how they stand to `job.json`; any process of this user can read
it there, and leave the order to cancel. `LocalJob` is the handle in the supervising process; that
of a scheduler's job is in `places/slurm/job.py`.
"""

from __future__ import annotations

import atexit
import copy
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, overload

from unisono.errors import (
    JobCancelled,
    PlatformError,
    RankFailed,
    RankTimeout,
    RemoteError,
    UnisonoError,
)
from unisono.expect import expect_int
from unisono.launch import job_files
from unisono.launch.attempts import Run, job_directory, telling
from unisono.launch.elastic.settings import RESIZE
from unisono.launch.elastic.supervisor import read_events
from unisono.launch.logs import LogReader
from unisono.launch.places.mailbox import CANCEL, Mailbox
from unisono.launch.pool.payload import dump_call
from unisono.launch.pool.stacks import StackDumps, own_frames_hidden, user_threads
from unisono.launch.request import Request
from unisono.launch.results import Results
from unisono.processes import process_start

__all__ = ["Job"]

ENDS = ("done", "failed", "timeout", "cancelled")
"""States that do not change any more."""
POLL_S = 0.1
"""Seconds between two looks at a log."""
ORDER_S = 0.2
"""Seconds between two looks for an order of another process."""


class State(NamedTuple):
    """How a job stands."""

    name: str
    attempt: int
    reason: str


class Job:
    """The handle on a run in the background.

    Attributes:
        id: name of the job.
        dir: its directory, with the logs.
    """

    id: str
    dir: Path
    CANCEL_S = 30.0
    """Longest wait for the end of a job that was told to end."""
    _is_cancelled = False

    def __init__(self, directory: Path) -> None:
        self.dir = directory
        self._entry = job_files.read_state(directory)
        if "id" not in self._entry:
            raise PlatformError.because(
                f"the job in {directory}", "a run, which somebody waits for", None, "unisono.submit"
            )
        self.id = str(self._entry["id"])

    @staticmethod
    def attach(id_or_dir: str | Path) -> Job:
        """Return the handle again, in whatever process, from the id or the directory."""
        for job in list(_running):
            if job.id == str(id_or_dir) or job.dir == Path(id_or_dir).absolute():
                return job
        directory = _find(id_or_dir)
        if job_files.read_state(directory).get("kind") == "slurm":
            from unisono.launch.places.slurm.job import SlurmJob

            return SlurmJob(directory)
        return Job(directory)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return int(self._entry["ranks"])

    @property
    def attempt(self) -> int:
        """Number of the present attempt."""
        return self._look().attempt

    @property
    def reason(self) -> str:
        """Why it is in its state, in one line."""
        return self._look().reason

    def status(self) -> str:
        """Return `pending`, `running`, `requeued`, `done`, `failed`, `timeout` or `cancelled`."""
        return self._look().name

    def done(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self.status() in ENDS

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end, whatever it is; return whether it has come in time."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        pause = 0.05
        while not self.done():
            if end is not None and time.monotonic() > end:
                return False
            time.sleep(pause)
            pause = min(0.5, 1.1 * pause)
        return True

    def result(self, timeout_s: float | None = None) -> Results[Any]:
        """Wait, and return the results or raise what went wrong (`TimeoutError`: not yet)."""
        with own_frames_hidden():
            if not self.wait(timeout_s):
                raise TimeoutError(f"job {self.id} has not ended within {timeout_s:g} s")
            return self._results()

    def cancel(self) -> None:
        """End all ranks, and stay until they have. Safe to repeat."""
        if not self.done():
            self._is_cancelled = True
            with suppress(FileNotFoundError):  # its directory goes with the job
                job_files.write_private(self.dir / CANCEL, b"")
            self.wait(self.CANCEL_S)

    def resize(self, ranks: int) -> None:
        """Have another number of ranks, from the next step on; for jobs with `elastic=True`."""
        expect_int("ranks", ranks, 1, error=PlatformError)
        least, most = self._entry.get("elastic") or (0, 0)
        if not least <= ranks <= most:
            raise PlatformError.because(
                f"job {self.id} with {ranks} ranks",
                f"it may have {least} to {most}"
                if most
                else "it is not elastic, or on SLURM, which gives a job its nodes once",
                None,
                f"{least} to {most}" if most else "unisono.submit(..., ranks=(1, 8))",
            )
        with suppress(FileNotFoundError):  # its directory goes with the job
            if not self.done():
                job_files.write_private(self.dir / RESIZE, str(ranks).encode())
                return
        raise PlatformError.because(
            f"job {self.id} with {ranks} ranks", "it has ended", None, "unisono job list"
        )

    def members(self) -> int:
        """Return how many ranks share the steps of an elastic job now; 0 before the first one."""
        events = read_events(self.dir)
        return int(events[-1]["members"]) if events else 0

    def stacks(self) -> dict[int, str]:
        """Return where every rank stands; nothing if none runs (here, without a scheduler)."""
        if self.done():
            return {}
        if "plan" in job_files.read_state(self.dir):  # their agents look into the directory
            return Mailbox(self.dir, self.attempt).ask_for_stacks(self.ranks)
        paths: dict[int, Path] = {}
        signals: dict[int, signal.Signals] = {}
        for path in self.dir.glob("rank-*.pid"):
            job_files.check_ours(path)
            pid, start, name = path.read_text().split()
            if str(process_start(int(pid))) == start:
                paths[int(path.stem.removeprefix("rank-"))] = path.with_suffix(".stack")
                signals[int(pid)] = signal.Signals[name]
        dumps = StackDumps(paths)
        for pid, number in signals.items():
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        return {rank: user_threads(text) for rank, text in dumps.wait().items()}

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
        expect_int("rank", rank, 0, self.ranks, error=PlatformError)
        if follow:
            return self._follow(self.dir / f"rank-{rank}.log")
        lines = self._log_text(rank).splitlines(keepends=True)
        return "".join(lines if tail is None else lines[max(0, len(lines) - tail) :])

    def _log_text(self, rank: int) -> str:
        path = self.dir / f"rank-{rank}.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def _follow(self, path: Path) -> Iterator[str]:
        log, rest = LogReader(path), b""
        while True:
            is_over = self.done()
            whole, end, rest = b"".join([rest, *log.new()]).rpartition(b"\n")
            data = whole + end + rest if is_over else whole
            yield from data.decode(errors="replace").splitlines()
            if is_over:
                return
            time.sleep(POLL_S)

    def _look(self) -> State:
        """Return how it stands; a job whose process was killed has failed."""
        try:
            self._entry = job_files.read_state(self.dir)
        except (OSError, PlatformError):
            if (self.dir / job_files.STATE).exists():
                raise
            # A temporary directory goes with a job that did not fail.
            self._entry["state"] = "cancelled" if self._is_cancelled else "done"
        entry = self._entry
        is_here = entry.get("host", socket.gethostname()) == socket.gethostname()
        is_over = entry["state"] in ENDS
        if is_here and not is_over and process_start(entry["pid"]) != entry["pid_start"]:
            return State("failed", int(entry["attempt"]), "its process is gone")
        return State(str(entry["state"]), int(entry["attempt"]), str(entry["reason"]))

    def _results(self) -> Results[Any]:
        """Return the results of a job that has ended, or raise its error."""
        reason = self.reason
        if self._entry["state"] not in ENDS:
            raise RankFailed(f"job {self.id} failed: {reason}", job_dir=str(self.dir))
        if not self.dir.is_dir():
            if self._is_cancelled:
                raise JobCancelled(f"job {self.id} was cancelled", job_id=self.id)
            raise PlatformError.because(
                f"the results of job {self.id}",
                f"{self.dir} was temporary, and is gone",
                None,
                'logs="runs" when it is submitted keeps them',
            )
        outcome = job_files.read_outcome(self.dir)
        if isinstance(outcome, RankFailed):  # the traceback is shown once, here or there
            text = (outcome.traceback or "").rstrip()
            raise outcome from (None if text in str(outcome) else RemoteError(text))
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def __repr__(self) -> str:
        return f"<Job {self.id} {self.status()}>"


class LocalJob(Job):
    """A run that a thread of this process supervises; its ranks end with this process."""

    def __init__(self, request: Request) -> None:
        """Start a checked request in the background."""
        call = dump_call(request.fn, request.args, request.kwargs)
        elastic = request.elastic if request.platform.kind.is_here else None
        with ExitStack() as stack:  # which removes the directory of a run that is refused
            self.dir = stack.enter_context(job_directory(request))
            self._launch = Run(request, call, self.dir, self._note)
            self._stack = stack.pop_all()
        self.id = self.dir.name
        self._outcome: Results[Any] | BaseException | None = None
        self._ended = threading.Event()
        self._entry = {
            "id": self.id,
            "name": request.name,
            "ranks": request.ranks,
            "elastic": elastic and (elastic.least, elastic.most),
            "submitted": time.time(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "pid_start": process_start(os.getpid()),
        }
        self._note("pending")
        job_files.remember(self.id, self.dir)
        _running.add(self)
        for target in (self._run, self._heed_order):
            threading.Thread(target=target, name=f"unisono-job-{self.id}", daemon=True).start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end, whatever it is; return whether it has come in time."""
        return self._ended.wait(timeout_s)

    def cancel(self) -> None:
        """End all ranks, and wait until they have."""
        if not self._ended.is_set():
            self._launch.cancel()
            self._ended.wait()

    def stacks(self) -> dict[int, str]:
        """Return where every rank stands."""
        return {} if self._ended.is_set() else self._launch.stacks()

    def _look(self) -> State:
        return State(
            self._entry["state"], max(0, self._launch.progress.attempt), self._entry["reason"]
        )

    def _results(self) -> Results[Any]:
        if isinstance(self._outcome, Results):
            return self._outcome
        raise self._outcome or RankFailed(f"job {self.id} left no results")

    def _log_text(self, rank: int) -> str:
        if isinstance(self._outcome, Results):
            return self._outcome.log(rank)
        return super()._log_text(rank)

    def _run(self) -> None:
        end = "failed"
        try:
            with self._stack, telling(self._launch.request.platform):
                self._outcome = self._launch.results()
            end = "done"
        except JobCancelled as error:
            self._outcome, end = JobCancelled(str(error), job_id=self.id), "cancelled"
        except RankTimeout as error:
            self._outcome, end = error, "timeout"
        except BaseException as error:
            self._outcome = error
        finally:
            self._note(end)
            if not self.dir.is_dir():
                job_files.forget(self.id)
            _running.discard(self)
            self._ended.set()

    def _heed_order(self) -> None:
        """Cancel the run if another process has left the order to."""
        while not self._ended.wait(ORDER_S):
            if (self.dir / CANCEL).exists():
                self._launch.cancel()
                return

    def _note(self, state: str) -> None:
        """Note how the job stands, for this process and, in files, for others."""
        is_error = isinstance(self._outcome, BaseException)
        reason = str(self._outcome).splitlines()[0] if is_error else ""
        self._entry |= {
            "state": state,
            "attempt": max(0, self._launch.progress.attempt),
            "reason": reason,
        }
        if not self.dir.is_dir():
            return
        if state in ENDS:
            job_files.write_outcome(self.dir, _readable(self._outcome))
        job_files.update_state(self.dir, self._entry)


_running: weakref.WeakSet[LocalJob] = weakref.WeakSet()
"""The jobs that this process supervises."""


def _readable(outcome: object) -> object:
    """Return results, or an error that another process can read whatever its cause is."""
    if not isinstance(outcome, BaseException):
        return outcome
    if not isinstance(outcome, UnisonoError):
        return RankFailed(f"{type(outcome).__name__}: {outcome}")
    twin = copy.copy(outcome)
    if isinstance(twin, RankFailed):
        twin.exception = None
    return twin


def _end_running_jobs() -> None:
    """The ranks of local jobs end with this process."""
    for job in list(_running):
        job.cancel()


atexit.register(_end_running_jobs)


def _find(id_or_dir: str | Path) -> Path:
    """Return the directory of a job: itself, known by its id or a unique part, or a scheduler's."""
    path, word = Path(id_or_dir), str(id_or_dir)
    if (path / job_files.STATE).is_file():
        return path.absolute()
    known = job_files.directories()
    if word in known:
        return known[word]
    if word.isdigit():
        from unisono.launch.places.slurm.cluster import directory_of_job

        if (directory := directory_of_job(word)) is not None:
            return directory
    near = [job for job in known if word and (job.startswith(word) or job.endswith(word))]
    if len(near) == 1:
        return known[near[0]]
    latest = sorted(known, key=lambda job: (known[job] / job_files.STATE).stat().st_mtime)[-8:]
    raise PlatformError.because(
        f"the job {id_or_dir}",
        f"{len(near)} jobs with that in their names: {', '.join(near)}"
        if near
        else f"no such job here, in {job_files.folder()}, nor of a scheduler",
        None,
        f"unisono job list; the latest are {', '.join(latest)}" if latest else "its directory",
    )
