"""Engines of our own transports: they can break, and run calls in one order."""

from __future__ import annotations

import os
import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from unisono.comm.engine import Engine, Ticket
from unisono.comm.transports.jobs import Job, JobQueue
from unisono.errors import CollectiveMismatch, RankFailed, UnisonoError

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
