"""What a rank looks for during a long wait: dead peers, failed peers, its deadline.

The core asks after a wait has lasted for tens of milliseconds, so it costs the fast path nothing.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from typing import Any

from unisono.comm.health.deadlock import hopeless
from unisono.comm.machine import is_dead
from unisono.errors import RankFailed, RankTimeout, UnisonoError, compress_ranks

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
        self._ask_store = 0.0
        self._doubt = False

    def look(self, doing: str, missing: Sequence[int], waited_s: float, timeout_s: float) -> None:
        """Raise if a wait for the `missing` ranks cannot end well, or has lasted too long."""
        self.judge(doing, missing)
        if waited_s >= timeout_s:
            raise self._timed_out(doing, missing, timeout_s)
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
            if state <= ALIVE and is_dead(*self._processes[rank]):
                raise self._died(doing, rank)
        for rank, (state, culprit, text) in states.items():
            if state == FAILED:
                raise self._failed(doing, rank, culprit, text.decode(errors="replace"))
            if state == GAVE_UP:
                raise self._gave_up(doing, rank, culprit, text.decode(errors="replace"))
            if state == CLOSED:
                raise self._left(doing, rank)

    def _timed_out(self, doing: str, missing: Sequence[int], timeout_s: float) -> RankTimeout:
        absent = [self.ranks[rank] for rank in missing]
        return RankTimeout(
            f"{doing} on rank {self._me} timed out after {timeout_s:g} s\n"
            f"  not arrived: rank {compress_ranks(absent)}\n"
            "  HINT: UNISONO_CHECK=1 names the first call in which ranks disagree; "
            "UNISONO_TIMEOUT_S sets the deadline",
            missing=absent,
            op=doing,
        )

    def _died(self, doing: str, rank: int) -> RankFailed:
        name, host = self.ranks[rank], socket.gethostname()
        return RankFailed(
            f"rank {name} (process {self._processes[rank][0]} on {host}) died "
            f"while rank {self._me} waited for it in {doing}\n"
            f"  HINT: look at the last output of rank {name}; "
            "a process killed for lack of memory leaves none",
            rank=name,
            host=host,
        )

    def _failed(self, doing: str, rank: int, culprit: int, text: str) -> RankFailed:
        teller = self.ranks[rank]
        start = (
            f"rank {teller} failed"
            if culprit == teller
            else f"rank {culprit} failed, as rank {teller} has seen"
        )
        return RankFailed(
            f"{start} while rank {self._me} waited in {doing}\n{text}",
            rank=culprit,
            host=socket.gethostname(),
            traceback=text,
        )

    def _gave_up(self, doing: str, rank: int, culprit: int, text: str) -> RankFailed | RankTimeout:
        """Return the error for a peer whose own deadline has passed: it will not come any more."""
        teller = self.ranks[rank]
        if culprit == self._me:
            return RankTimeout(
                f"{doing} on rank {self._me} cannot end: "
                f"rank {teller} waited for this rank and has given up\n{text}",
                missing=[teller],
                op=doing,
            )
        return RankFailed(
            f"rank {teller} has given up waiting for rank {culprit}, "
            f"while rank {self._me} waited in {doing}\n{text}",
            rank=culprit,
            host=socket.gethostname(),
            traceback=text,
        )

    def _left(self, doing: str, rank: int) -> RankFailed:
        name = self.ranks[rank]
        return RankFailed(
            f"rank {name} has closed the group, but rank {self._me} waits for it in {doing}\n"
            "  HINT: let all ranks make the same calls before destroy_process_group()",
            rank=name,
            host=socket.gethostname(),
        )
