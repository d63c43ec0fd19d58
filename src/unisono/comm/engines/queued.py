"""Engines of our own transports: they can break, and run calls in one order.

Calls of one group run in the order in which they were issued. A blocking call runs in the caller's
thread when nothing is queued. Asynchronous calls run in one background thread, started by the first
of them; whoever waits for one lends a hand instead of idling. A call issued while another of the
same group runs in this thread (from a callback of its future) runs at once: queueing it would wait
for itself.
"""

from __future__ import annotations

import os
import queue
import threading
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from unisono.comm.engines.base import Engine, Ticket
from unisono.errors import CollectiveMismatch, RankFailed, UnisonoError

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


_CLOSE_S = 10.0
"""Longest time to let queued calls end when a group is closed."""


class JobTicket:
    """A queued call, as the verbs see it."""

    def __init__(self, jobs: JobQueue, job: Job) -> None:
        self._jobs = jobs
        self._job = job

    def wait(self, timeout_s: float) -> None:
        """See `Ticket`."""
        self._jobs.finish(self._job, timeout_s)

    def done(self) -> bool:
        """See `Ticket`."""
        return self._job.is_done

    @property
    def error(self) -> BaseException | None:
        """What the call has raised."""
        return self._job.error if self._job.is_done else None

    def then(self, callback: Callable[[], None]) -> None:
        """Call `callback()` when the call has ended; at once if it has."""
        self._job.then(callback)


class SourceTicket(Ticket, Protocol):
    """A receive from anybody."""

    @property
    def source(self) -> int:
        """Rank of the group that sent the message, once it is done."""
        ...


class TransportEngine(Engine):
    """An engine of ours: it can break, and after the first error every call raises with its cause.

    Args:
        rank: own rank in the group.
        ranks: world ranks of the group, for messages.
    """

    def __init__(self, rank: int, ranks: Sequence[int]) -> None:
        self.rank = rank
        self.size = len(ranks)
        self.ranks = tuple(ranks)
        self.cause: BaseException | None = None
        """Why the group cannot be used any more."""
        self.pid = os.getpid()
        self.is_closed = False
        """Whether this rank has left the group."""
        _engines.add(self)

    def tell_failure(self, error: BaseException) -> None:
        """Let the other ranks know that this one has failed."""

    def fail(self, error: BaseException) -> None:
        """Break the group for this rank and tell the others why; the first cause stays."""
        if self.cause is None:
            self.cause = error
            self.tell_failure(error)

    def culprit(self, error: BaseException) -> int:
        """Return the world rank that is to blame for `error`."""
        rank = getattr(error, "rank", None)
        return rank if isinstance(rank, int) else self.ranks[self.rank]

    def check_usable(self) -> None:
        """Raise if the group is broken, closed, or was left behind by a fork."""
        if self.cause is not None:
            raise self.unusable()

    def unusable(self) -> UnisonoError:
        """Return the error of a call on a group that has broken."""
        cause = self.cause
        text = (
            f"this {self.backend} group of ranks {list(self.ranks)} cannot be used any more\n"
            f"  first cause: {type(cause).__name__}: {cause}"
        )
        if isinstance(cause, RankFailed):
            return RankFailed(text, rank=cause.rank, host=cause.host, traceback=cause.traceback)
        if isinstance(cause, CollectiveMismatch):
            return CollectiveMismatch(text, cause.calls)
        return UnisonoError(text)

    def abandon_after_fork(self) -> None:
        """Make the group unusable in a forked child; nothing is told to the other ranks."""
        self.cause = UnisonoError(
            f"this process was forked from rank {self.ranks[self.rank]} (process {self.pid}) "
            "after the group was made\n"
            "  HINT: start workers with the 'spawn' or 'forkserver' method, "
            "or use the group in the parent only"
        )

    @abstractmethod
    def receive_any(self, x: Tensor, tag: int) -> SourceTicket:
        """Start to receive a message with `tag` from whoever sends one first."""

    def close(self) -> None:
        """Leave the group: let started calls end, then give everything back. Safe to repeat."""
        if os.getpid() != self.pid or self.is_closed:
            return
        self.is_closed = True
        if self.cause is not None:
            self.cancel("the group is broken")  # nobody will come any more
        if not self.finish_started(_CLOSE_S):
            self.cancel("the group was closed while this call waited")
            self.finish_started(_CLOSE_S)
        if self.cause is None:
            self.cause = UnisonoError("the group was closed by destroy_process_group()")
        self.release()

    def finish_started(self, timeout_s: float) -> bool:  # noqa: ARG002
        """Let started calls end; return whether they have within the time."""
        return True

    def cancel(self, why: str) -> None:
        """End the wait of the call under way, from another thread."""

    def release(self) -> None:
        """Give everything back; nothing runs any more."""


_engines: weakref.WeakSet[TransportEngine] = weakref.WeakSet()


def _abandon_after_fork() -> None:
    for engine in list(_engines):
        engine.abandon_after_fork()


os.register_at_fork(after_in_child=_abandon_after_fork)


class QueuedEngine(TransportEngine):
    """Runs Python kernels through a `JobQueue`.

    Args:
        rank: own rank in the group.
        ranks: world ranks of the group, for messages.
        jobs: order of calls.
    """

    def __init__(self, rank: int, ranks: Sequence[int], jobs: JobQueue) -> None:
        super().__init__(rank, ranks)
        self.jobs = jobs

    def call(
        self, name: str, kernel: Callable[[], Any], async_op: bool, timeout_s: float
    ) -> Ticket | None:
        """Run a blocking kernel in the group's order of calls.

        Args:
            name: the call, for messages.
            kernel: does the whole of it.
            async_op: return a ticket and let the background thread run it.
            timeout_s: deadline of each wait in it.
        """
        if async_op:
            self.check_usable()
            job = Job(partial(self._run, name, kernel, timeout_s))
            self.jobs.post(job)
            return JobTicket(self.jobs, job)
        self.jobs.run(self._run, name, kernel, timeout_s)
        return None

    def prepare(self, name: str, timeout_s: float) -> None:
        """Set up for one kernel; called in the thread that runs it."""

    def _run(self, name: str, kernel: Callable[[], Any], timeout_s: float) -> None:
        self.check_usable()
        self.prepare(name, timeout_s)
        try:
            kernel()
        except Refused:
            raise
        except BaseException as error:
            self.fail(error)
            raise

    def abandon_after_fork(self) -> None:
        """See `TransportEngine`."""
        super().abandon_after_fork()
        self.jobs.forget()

    def finish_started(self, timeout_s: float) -> bool:
        """See `TransportEngine`."""
        return self.jobs.close(timeout_s)


class Refused(UnisonoError):
    """A wish that all ranks have turned down together; the group is as good as before."""
