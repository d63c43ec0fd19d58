"""A run that a thread of this process supervises, and the handle on it.

Other processes know it by its directory: they read how it stands, and leave the order to cancel it
there.
"""

from __future__ import annotations

import atexit
import copy
import os
import socket
import threading
import time
import weakref
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from unisono.errors import JobCancelled, RankFailed, RankTimeout, UnisonoError
from unisono.launch import job_files, registry
from unisono.launch.attempts import Attempts, job_directory
from unisono.launch.conventions import Convention
from unisono.launch.job import ENDS, Job
from unisono.launch.payload import dump_call
from unisono.launch.pool.remote import CANCEL
from unisono.launch.request import Request
from unisono.launch.results import Results
from unisono.launch.run import telling
from unisono.launch.stacks import own_frames_hidden

LOOK_S = 0.2
"""Seconds between two looks for an order of another process."""


def start_local_job(request: Request, convention: Convention) -> Job:
    """Start a checked request in the background."""
    call = dump_call(request.fn, request.args, request.kwargs)
    with ExitStack() as stack:
        job_dir = stack.enter_context(job_directory(request))
        attempts = Attempts(request=request, call=call, job_dir=job_dir, convention=convention)
        job = LocalJob(attempts, stack.pop_all())
    job.start()
    return job


def running_job(id_or_dir: str | Path) -> Job | None:
    """Return the handle on a job that this very process supervises."""
    for job in list(_running):
        if job.id == str(id_or_dir) or job.dir == Path(id_or_dir).absolute():
            return job
    return None


class LocalJob(Job):
    """A run that a thread of this process supervises; its ranks end with this process."""

    def __init__(self, attempts: Attempts, stack: ExitStack) -> None:
        self.id = attempts.job_dir.name
        self.dir = attempts.job_dir
        self._attempts = attempts
        self._attempts.on_state = self._note
        self._stack = stack
        self._state = "pending"
        self._results: Results[Any] | None = None
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._submitted = time.time()

    def start(self) -> None:
        """Begin."""
        self._note("pending")
        registry.remember(self.id, self.dir)
        _running.add(self)
        for target in (self._run, self._heed_order):
            threading.Thread(target=target, name=f"unisono-job-{self.id}", daemon=True).start()

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self._attempts.request.ranks

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
        with own_frames_hidden():
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
            if not self.dir.is_dir():
                registry.forget(self.id)
            _running.discard(self)
            self._ended.set()

    def _heed_order(self) -> None:
        """Cancel the run if another process has left the order to."""
        while not self._ended.wait(LOOK_S):
            if (self.dir / CANCEL).exists():
                self._attempts.cancel()
                return

    def _note(self, state: str) -> None:
        self._state = state
        if not self.dir.is_dir():
            return
        if state in ENDS:
            outcome = self._results if self._error is None else _plain(self._error)
            job_files.write_outcome(self.dir, outcome)
        job_files.update_state(
            self.dir,
            {
                "id": self.id,
                "name": self._attempts.request.name,
                "ranks": self.ranks,
                "submitted": self._submitted,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "pid_start": job_files.process_start(os.getpid()),
                "state": state,
                "attempt": self._attempts.number,
                "reason": self.reason,
            },
        )


_running: weakref.WeakSet[LocalJob] = weakref.WeakSet()


def _plain(error: BaseException) -> BaseException:
    """Return an error that another process can read whatever its cause is."""
    if not isinstance(error, UnisonoError):
        return RankFailed(f"{type(error).__name__}: {error}")
    twin = copy.copy(error)
    if isinstance(twin, RankFailed):
        twin.exception = None
    return twin


def _end_running_jobs() -> None:
    """The ranks of local jobs end with this process."""
    for job in list(_running):
        job.cancel()


atexit.register(_end_running_jobs)
