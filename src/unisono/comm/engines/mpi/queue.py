"""The order of calls of one group over MPI.

Calls run in the order in which they were issued. A blocking call runs in the caller's thread when
nothing is queued. Asynchronous calls run in one background thread, started by the first of them. A
call issued while another of the same group runs in this thread (from a callback of its future) runs
at once: queueing it would wait for itself.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import torch

_CHORE_S = 1e-3
"""Seconds between two chores of an idle background thread."""


class Job(Future[None]):
    """A call of a queue whose end others can wait for: a `Ticket`."""

    def __init__(self, jobs: JobQueue, call: Callable[[], object]) -> None:
        super().__init__()
        self._jobs = jobs
        self._call: Callable[[], object] | None = call
        self._is_inference = torch.is_inference_mode_enabled()  # of a thread, as the tensors are

    def run(self) -> None:
        """Run the call; its exception is kept for those who wait."""
        call, self._call = self._call, None
        try:
            if call is not None:
                with torch.inference_mode(self._is_inference):
                    call()
        except BaseException as error:
            self.set_exception(error)
        else:
            self.set_result(None)

    def wait(self, timeout_s: float) -> None:
        self._jobs.serve(self)
        self.result(min(timeout_s, threading.TIMEOUT_MAX))

    def then(self, callback: Callable[[], None]) -> None:
        """Call `callback()` now if this job has ended; else when those posted before now have, too.

        So what it calls comes behind those jobs on all ranks, the fast and the slow.
        """
        job = self if self.done() else self._jobs.latest_for(self)
        job.add_done_callback(lambda _: callback())


class JobQueue:
    """Runs the calls of one group.

    Args:
        name: name of the background thread.
        has_thread: whether there may be one; else an asynchronous call is over when it returns.
    """

    def __init__(self, name: str, *, has_thread: bool = True) -> None:
        self.name = name
        self.in_background = False
        """Whether the call under way runs in the background thread."""
        self.chore: Callable[[], bool] | None = None
        """What an idle background thread does; returns whether it is to be done again."""
        self._has_thread = has_thread
        self._jobs: deque[Job] = deque()
        self._latest: Job | None = None
        """The job that was posted last."""
        self._busy = threading.Lock()
        self._runner: int | None = None
        self._thread: threading.Thread | None = None
        self._bell: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def run(self, call: Callable[[], object]) -> None:
        """Run `call` now, after everything issued before it; raises what it raises."""
        me = threading.get_ident()
        if self._runner == me:
            call()
        elif self._jobs or not self._busy.acquire(blocking=False):
            job = Job(self, call)
            self.post(job)
            job.wait(threading.TIMEOUT_MAX)
        else:
            self._runner = me
            try:
                call()
            finally:
                self._runner = None
                self._busy.release()

    def post(self, job: Job) -> None:
        """Queue `job`, to run when everything issued before it has run."""
        if self._runner == threading.get_ident() or not self._has_thread:
            job.run()
        else:
            self._latest = job
            self._jobs.append(job)
            self.wake()

    def latest_for(self, job: Job) -> Job:
        """Return the job that was posted last; inside a call, which runs jobs at once, `job`."""
        return job if self._runner == threading.get_ident() or not self._latest else self._latest

    def wake(self) -> None:
        """Let the background thread look for work; starts it."""
        if self._has_thread:
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name=self.name, daemon=True)
                self._thread.start()
            self._bell.put(True)

    def serve(self, job: Job) -> None:
        """In the thread that runs calls: run those that are queued up to `job`."""
        while self._runner == threading.get_ident() and self._jobs and not job.done():
            self._jobs.popleft().run()

    def close(self, timeout_s: float) -> bool:
        """End the background thread after what is queued; return whether it has ended."""
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        self._bell.put(False)
        thread.join(timeout_s)
        if thread.is_alive():
            return False
        self._thread = None
        return True

    def forget(self) -> None:
        """Drop everything after a fork: the thread and the callers stayed in the parent."""
        self._jobs.clear()
        self._latest = None
        self._busy = threading.Lock()
        self._runner = None
        self._thread = None

    def _loop(self) -> None:
        goes_on, rest_s = True, None
        while goes_on:
            with contextlib.suppress(queue.Empty):
                goes_on = self._bell.get(timeout=rest_s)
            while self._jobs:
                with self._busy:
                    self._runner, self.in_background = threading.get_ident(), True
                    try:
                        if self._jobs:  # else its caller has served it
                            self._jobs.popleft().run()
                    finally:
                        self._runner, self.in_background = None, False
            rest_s = _CHORE_S if self.chore is not None and self.chore() else None
