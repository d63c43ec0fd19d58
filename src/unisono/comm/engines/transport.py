"""What the engines of our own transports share: they break, they end, a fork leaves them behind.

A rank that waits for long looks for dead peers, failed peers and its deadline (`Watch`). It looks
after tens of milliseconds, so that costs the fast path nothing.
"""

from __future__ import annotations

import os
import socket
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence

from unisono.comm.engines.base import Engine
from unisono.comm.health import failures
from unisono.comm.health.deadlock import obstacle_to
from unisono.errors import CollectiveMismatch, RankFailed, UnisonoError
from unisono.processes import is_dead

_CLOSE_S = 10.0
"""Longest time to let started calls end when a group is closed."""
_STORE_S = 0.5
"""Seconds between two looks at what ranks have said in the world's store."""


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
        self.pid = os.getpid()
        self.is_closed = False
        """Whether this rank has left the group."""
        _engines.add(self)

    def tell_failure(self, error: BaseException) -> None:
        """Let the other ranks know that this one has failed."""

    def fail(self, error: BaseException) -> None:
        """See `Engine`; the first cause stays."""
        if self.cause is None:
            self.cause = error
            self.tell_failure(error)

    def culprit(self, error: BaseException) -> int:
        """Return the world rank that is to blame for `error`."""
        rank = getattr(error, "rank", None)
        return rank if isinstance(rank, int) else self.ranks[self.rank]

    def check_usable(self) -> None:
        """See `Engine`: it may be closed, too, or left behind by a fork."""
        if self.cause is not None:
            raise self.unusable()

    def unusable(self) -> UnisonoError:
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
        self.cause = UnisonoError(
            f"this process was forked from rank {self.ranks[self.rank]} (process {self.pid}) "
            "after the group was made\n"
            "  HINT: start workers with the 'spawn' or 'forkserver' method, "
            "or use the group in the parent only"
        )

    def close(self) -> None:
        """See `Engine`: let started calls end, then give everything back."""
        if os.getpid() != self.pid or self.is_closed:
            return
        self.is_closed = True
        if self.cause is not None:
            self.cancel("the group is broken")  # no rank will come any more
        if not self.finish_started(_CLOSE_S):
            self.cancel("the group was closed while this call waited")
            self.finish_started(_CLOSE_S)
        if self.cause is None:
            self.cause = UnisonoError("the group was closed by destroy_process_group()")
        self.release()

    @abstractmethod
    def finish_started(self, timeout_s: float) -> bool:
        """Let started calls end; return whether they have within the time."""

    @abstractmethod
    def release(self) -> None:
        """Give everything back; nothing runs any more."""


_engines: weakref.WeakSet[TransportEngine] = weakref.WeakSet()


def living() -> list[TransportEngine]:
    """Return the engines of our own transports in this process."""
    return list(_engines)


def _abandon_after_fork() -> None:
    for engine in living():
        engine.abandon_after_fork()


os.register_at_fork(after_in_child=_abandon_after_fork)


class Watch(ABC):
    """Judges the peers of one rank of a group.

    Args:
        rank: own place in the group.
        ranks: world rank of each rank of the group, for messages.
        processes: process id and start time of each of them; None for those of other hosts.
    """

    def __init__(
        self, rank: int, ranks: Sequence[int], processes: Sequence[tuple[int, int] | None]
    ) -> None:
        self.ranks = tuple(ranks)
        self.me = self.ranks[rank]
        self.host = socket.gethostname()
        self.cancelled: str | None = None
        """Why waits of this rank shall end, set by another thread of this process."""
        self._processes = {
            place: process
            for place, process in enumerate(processes)
            if process is not None and place != rank
        }
        self._ask_store = 0.0
        self._doubt = False

    def look(
        self, doing: str, missing: Sequence[int] | None, waited_s: float, timeout_s: float
    ) -> None:
        """Raise if a wait cannot end well, or has lasted too long.

        Args:
            doing: the call that waits.
            missing: ranks of the group that have not come; None where it is not known who.
            waited_s: how long it has waited.
            timeout_s: its deadline.
        """
        self.judge(doing, missing)
        if waited_s >= timeout_s:
            absent = [self.ranks[rank] for rank in missing or ()]
            raise failures.not_arrived(doing, self.me, absent, timeout_s)
        now = time.monotonic()
        if waited_s < _STORE_S or (now < self._ask_store and not self._doubt):
            return
        self._ask_store = now + _STORE_S
        reason = obstacle_to()
        # Asking takes a while, in which those who were missing may have come; they have not if
        # the same is found again.
        if reason is not None and self._doubt:
            raise reason
        self._doubt = reason is not None

    def judge(self, doing: str, missing: Sequence[int] | None) -> None:
        """Raise if one of the `missing` ranks can no longer come."""
        if self.cancelled is not None:
            raise UnisonoError.because(f"{doing} on rank {self.me}", self.cancelled)
        self.hear(doing, missing)  # what a rank has said before its end tells more than its end
        for rank, (pid, started) in self._processes.items():
            if (missing is None or rank in missing) and is_dead(pid, started):
                raise failures.peer_died(doing, self.me, self.ranks[rank], pid, self.host)

    @abstractmethod
    def hear(self, doing: str, missing: Sequence[int] | None) -> None:
        """Raise if a `missing` rank has said that it will not come."""
