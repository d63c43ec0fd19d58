"""What the engines of our own transports share: they break, they end, a fork leaves them behind."""

from __future__ import annotations

import os
import weakref
from abc import abstractmethod
from collections.abc import Sequence

from unisono.comm.engines.base import Engine
from unisono.errors import CollectiveMismatch, RankFailed, UnisonoError

_CLOSE_S = 10.0
"""Longest time to let started calls end when a group is closed."""


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
            self.cancel("the group is broken")  # nobody will come any more
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
