"""Calls of one group in the order in which they were issued, at once or behind the caller's back.

A blocking call runs in the caller's thread when nothing is queued. Asynchronous calls run in one
background thread, started by the first of them; whoever waits for one lends a hand instead of
idling. A call issued while another of the same group runs in this thread (from a callback of its
future) runs at once: queueing it would wait for itself.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

_BACKGROUND_NAP_S = 2e-3
_LOOK_S = 2e-2
_LOOKS = 50
"""So often the background thread looks for chores by itself before it sleeps until it is woken."""


class Job:
    """A call whose end others can wait for.

    Attributes:
        error: what it raised.
        is_done: whether it has ended.
    """

    __slots__ = ("_call", "_callbacks", "_ended", "error", "is_done")

    def __init__(self, call: Callable[[], object]) -> None:
        self._call: Callable[[], object] | None = call
        self._ended = threading.Lock()
        self._ended.acquire()
        self.error: BaseException | None = None
        self.is_done = False
        self._callbacks: list[Callable[[], None]] = []

    def run(self) -> None:
        """Run the call; its exception is kept for those who wait."""
        call, self._call = self._call, None
        try:
            if call is not None:
                call()
        except BaseException as error:
            self.error = error
        self.is_done = True
        self._ended.release()
        self._call_back()

    def then(self, callback: Callable[[], None]) -> None:
        """Call `callback()` in the thread that ran the job when it has ended; now if it has."""
        self._callbacks.append(callback)
        if self.is_done:
            self._call_back()

    def _call_back(self) -> None:
        # Popped, so that it is called once where the job ends while `then` adds it.
        while self._callbacks:
            try:
                callback = self._callbacks.pop()
            except IndexError:
                return
            callback()

    def block(self, timeout_s: float) -> bool:
        """Block until the job has ended; return whether it has."""
        if self._ended.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX)):
            self._ended.release()
            return True
        return False


class JobQueue:
    """Runs the calls of one group.

    Args:
        name: name of the background thread.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.in_background = False
        """Whether the call under way runs in the background thread."""
        self.has_chores: Callable[[], bool] | None = None
        """Tells whether `chore` has something to do; asked by the idle background thread."""
        self.chore: Callable[[], bool] | None = None
        """Work without an order, done between calls; returns whether it got anything done."""
        self._jobs: deque[Job] = deque()
        self._busy = threading.Lock()
        self._runner: int | None = None
        self._thread: threading.Thread | None = None
        self._tokens: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._sleeps = True

    def run(self, call: Callable[..., Any], *args: Any) -> None:
        """Run `call` now, after everything issued before it; raises what it raises."""
        me = threading.get_ident()
        if self._runner == me:
            call(*args)
            return
        if self._jobs or not self._busy.acquire(blocking=False):
            job = Job(lambda: call(*args))
            self._jobs.append(job)
            self.finish(job, threading.TIMEOUT_MAX)
            return
        self._runner = me
        try:
            call(*args)
        finally:
            self._let_go()

    def post(self, job: Job) -> None:
        """Queue `job`, to run when everything issued before it has run."""
        if self._runner == threading.get_ident():
            job.run()
            return
        self._jobs.append(job)
        self.wake()

    def wake(self) -> None:
        """Let the background thread look for work; starts it."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name=self.name, daemon=True)
            self._thread.start()
        self._tokens.put(True)

    def mention(self) -> None:
        """Let the background thread look for chores before long; they are not urgent.

        A thread that is woken takes the interpreter from its caller, for longer than most chores
        would have lasted; one that looks now and then does not.
        """
        if self._sleeps:
            self.wake()

    def finish(self, job: Job, timeout_s: float) -> None:
        """Wait until `job` has ended, running queued calls here if nobody else does.

        Raises:
            TimeoutError: it has not ended in time.
            BaseException: what the job raised.
        """
        while not job.is_done:
            if self._runner == threading.get_ident():
                self._run_next()
            elif self._jobs and self._busy.acquire(blocking=False):
                self._run_held(job)
            elif job.block(timeout_s if self._thread is not None else _BACKGROUND_NAP_S):
                break
            elif self._thread is not None:
                raise TimeoutError(f"a call of {self.name} did not end within {timeout_s:g} s")
        if job.error is not None:
            raise job.error

    def close(self, timeout_s: float) -> bool:
        """End the background thread after what is queued; return whether it has ended."""
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        self._tokens.put(False)
        thread.join(timeout_s)
        if thread.is_alive():
            return False
        self._thread = None
        return True

    def forget(self) -> None:
        """Drop everything after a fork: the thread and the callers stayed in the parent."""
        self._jobs.clear()
        self._busy = threading.Lock()
        self._runner = None
        self._thread = None

    def _run_held(self, until: Job) -> None:
        """Run queued jobs up to `until` in this thread, which holds `_busy`."""
        self._runner = threading.get_ident()
        try:
            while self._jobs and not until.is_done:
                self._run_next()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        """Let others run calls, and see to those that were queued by other threads meanwhile.

        Whoever queued one before the lock was free sleeps; whoever comes later finds it free.
        """
        self._runner = None
        self._busy.release()
        if self._jobs and self._thread is not None:
            self._tokens.put(True)

    def _run_next(self) -> None:
        self._jobs.popleft().run()

    def _loop(self) -> None:
        me = threading.get_ident()
        nap_s, looks = _BACKGROUND_NAP_S, 0
        while True:
            if self.has_chores is None:
                rest_s = None
            elif self.has_chores():
                rest_s, looks = nap_s, _LOOKS
            else:
                self._sleeps = looks == 0
                # Who mentions something after this look finds the thread asleep, and wakes it.
                rest_s = 0.0 if self.has_chores() else _LOOK_S if looks else None
                looks = max(looks - 1, 0)
            try:
                goes_on = self._tokens.get(timeout=rest_s)
                looks = _LOOKS
            except queue.Empty:
                goes_on = True
            self._sleeps = False
            while self._jobs:
                with self._busy:
                    if not self._jobs:
                        break
                    self._runner = me
                    self.in_background = True
                    try:
                        self._run_next()
                    finally:
                        self.in_background = False
                        self._runner = None
            if not goes_on:
                return
            if self.chore is not None and self.has_chores is not None and self.has_chores():
                nap_s = 1e-4 if self.chore() else _BACKGROUND_NAP_S
