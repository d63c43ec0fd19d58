"""What a rank looks for during a long wait: dead peers, failed peers, its deadline.

It looks after a wait has lasted for tens of milliseconds, so it costs the fast path nothing.
"""

from __future__ import annotations

import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

from unisono.comm.health import failures
from unisono.comm.health.deadlock import hopeless
from unisono.errors import UnisonoError
from unisono.processes import is_dead

_STORE_S = 0.5
"""Seconds between two looks at what ranks have said in the world's store."""


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
        reason = hopeless()
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
