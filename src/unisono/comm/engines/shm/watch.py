"""What a rank looks for during a long wait: dead peers, failed peers, its deadline.

The core asks after a wait has lasted for tens of milliseconds, so it costs the fast path nothing.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from typing import Any

from unisono.comm.health import failures
from unisono.comm.health.deadlock import hopeless
from unisono.comm.machine import is_dead
from unisono.errors import UnisonoError

JOINING, ALIVE, FAILED, CLOSED, GAVE_UP = 0, 1, 2, 3, 4
"""States of a rank, as the core numbers them. A rank gives up when its deadline passes."""

_STORE_S = 0.5
"""Seconds between two looks at what ranks have said in the world's store."""


class Watch:
    """Judges the peers of one rank.

    Args:
        rank: own place in the segment.
        ranks: world rank of each rank of the segment, for messages.
        processes: process id and start time of each of them.
    """

    def __init__(
        self, rank: int, ranks: Sequence[int], processes: Sequence[tuple[int, int]]
    ) -> None:
        self.ranks = tuple(ranks)
        self.group: Any = None
        """The core's group, which knows the states of all ranks."""
        self.cancelled: str | None = None
        """Why waits of this rank shall end, set by another thread of this process."""
        self._processes = tuple(processes)
        self._me = self.ranks[rank]
        self._host = socket.gethostname()
        self._ask_store = 0.0
        self._doubt = False

    def look(self, doing: str, missing: Sequence[int], waited_s: float, timeout_s: float) -> None:
        """Raise if a wait for the `missing` ranks cannot end well, or has lasted too long."""
        self.judge(doing, missing)
        if waited_s >= timeout_s:
            absent = [self.ranks[rank] for rank in missing]
            raise failures.not_arrived(doing, self._me, absent, timeout_s)
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

    def judge(self, doing: str, missing: Sequence[int]) -> None:
        """Raise if one of the `missing` ranks can no longer come."""
        if self.cancelled is not None:
            raise UnisonoError.because(f"{doing} on rank {self._me}", self.cancelled)
        states = {rank: self.group.state(rank) for rank in missing}
        for rank, (state, _, _) in states.items():
            pid, started = self._processes[rank]
            if state <= ALIVE and is_dead(pid, started):
                raise failures.peer_died(doing, self._me, self.ranks[rank], pid, self._host)
        for rank, (state, culprit, raw) in states.items():
            told = (self.ranks[rank], culprit, self._host, raw.decode(errors="replace"))
            if state == FAILED:
                raise failures.peer_failed(doing, self._me, *told)
            if state == GAVE_UP:
                raise failures.peer_gave_up(doing, self._me, *told)
            if state == CLOSED:
                raise failures.peer_left(doing, self._me, [self.ranks[rank]])
