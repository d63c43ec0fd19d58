"""What a rank looks for during a long wait: dead peers, failed peers, its deadline.

Asked only after a wait has lasted for tens of milliseconds, so that it costs the fast path nothing.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence

from unisono.comm.outlook import hopeless
from unisono.comm.transports.shm.control import Control
from unisono.comm.transports.shm.layout import CLOSED, CULPRIT, FAILED, GAVE_UP, STATE
from unisono.errors import RankFailed, RankTimeout, UnisonoError, compress_ranks

PEERS_S = 0.05
"""Seconds between two looks at the peers."""
STORE_S = 0.5
"""Seconds between two looks at what ranks have said in the world's store."""
_TOLD = (FAILED, CLOSED, GAVE_UP)
"""States of ranks that have said why they will not come."""


class Watch:
    """Judges the peers of one rank.

    Args:
        control: control blocks of the segment.
        ranks: world rank of each rank of the segment, for messages.
    """

    def __init__(self, control: Control, ranks: Sequence[int]) -> None:
        self._control = control
        self.ranks = tuple(ranks)
        self.doing = "set-up"
        """Name of the call under way, for messages."""
        self.cancelled: str | None = None
        """Why waits of this rank shall end, set by another thread of this process."""

    def begin(self, timeout_s: float) -> Vigil:
        """Start to watch over one wait."""
        return Vigil(self, timeout_s)

    def judge(self, missing: Sequence[int]) -> None:
        """Raise if one of the `missing` ranks can no longer come."""
        if self.cancelled is not None:
            raise UnisonoError.because(f"{self.doing} on rank {self._me}", self.cancelled)
        control = self._control
        for rank in missing:
            if control.word(rank, STATE) not in _TOLD and control.is_dead(rank):
                raise self._died(rank)
        for rank in missing:
            state = control.word(rank, STATE)
            if state == FAILED:
                raise self._failed(rank)
            if state == GAVE_UP:
                raise self._gave_up(rank)
            if state == CLOSED:
                raise self._left(rank)

    def timed_out(self, missing: Sequence[int], timeout_s: float) -> RankTimeout:
        """Return the error for a deadline that passed."""
        absent = [self.ranks[rank] for rank in missing]
        return RankTimeout(
            f"{self.doing} on rank {self._me} timed out after {timeout_s:g} s\n"
            f"  not arrived: rank {compress_ranks(absent)}\n"
            "  HINT: UNISONO_CHECK=1 names the first call in which ranks disagree; "
            "UNISONO_TIMEOUT_S sets the deadline",
            missing=absent,
            op=self.doing,
        )

    @property
    def _me(self) -> int:
        return self.ranks[self._control.rank]

    def _died(self, rank: int) -> RankFailed:
        name, host = self.ranks[rank], socket.gethostname()
        return RankFailed(
            f"rank {name} (process {self._control.pid(rank)} on {host}) died "
            f"while rank {self._me} waited for it in {self.doing}\n"
            f"  HINT: look at the last output of rank {name}; "
            "a process killed for lack of memory leaves none",
            rank=name,
            host=host,
        )

    def _failed(self, rank: int) -> RankFailed:
        text = self._control.failure_text(rank)
        culprit = self._control.word(rank, CULPRIT)
        teller = self.ranks[rank]
        start = (
            f"rank {teller} failed"
            if culprit == teller
            else f"rank {culprit} failed, as rank {teller} has seen"
        )
        return RankFailed(
            f"{start} while rank {self._me} waited in {self.doing}\n{text}",
            rank=culprit,
            host=socket.gethostname(),
            traceback=text,
        )

    def _gave_up(self, rank: int) -> RankFailed | RankTimeout:
        """Return the error for a peer whose own deadline has passed: it will not come any more."""
        teller, culprit = self.ranks[rank], self._control.word(rank, CULPRIT)
        text = self._control.failure_text(rank)
        if culprit == self._me:
            return RankTimeout(
                f"{self.doing} on rank {self._me} cannot end: "
                f"rank {teller} waited for this rank and has given up\n{text}",
                missing=[teller],
                op=self.doing,
            )
        return RankFailed(
            f"rank {teller} has given up waiting for rank {culprit}, "
            f"while rank {self._me} waited in {self.doing}\n{text}",
            rank=culprit,
            host=socket.gethostname(),
            traceback=text,
        )

    def _left(self, rank: int) -> RankFailed:
        name = self.ranks[rank]
        return RankFailed(
            f"rank {name} has closed the group, "
            f"but rank {self._me} waits for it in {self.doing}\n"
            "  HINT: let all ranks make the same calls before destroy_process_group()",
            rank=name,
            host=socket.gethostname(),
        )


class Vigil:
    """One wait: when to look at the peers, and when to give up."""

    __slots__ = ("_ask_store", "_deadline", "_look", "_timeout_s", "_watch")

    def __init__(self, watch: Watch, timeout_s: float) -> None:
        now = time.monotonic()
        self._watch = watch
        self._timeout_s = timeout_s
        self._deadline = now + timeout_s
        self._look = now + min(PEERS_S, timeout_s)
        self._ask_store = now + STORE_S

    def look(self, missing: Callable[[], list[int]]) -> None:
        """Look at the peers if it is time to; `missing` tells who has not arrived."""
        now = time.monotonic()
        if now < self._look:
            return
        self._look = now + PEERS_S
        absent = missing()
        if not absent:
            return
        self._watch.judge(absent)
        if now >= self._deadline:
            raise self._watch.timed_out(absent, self._timeout_s)
        self._look = min(self._look, self._deadline)
        if now >= self._ask_store:
            self._ask_store = now + STORE_S
            reason = hopeless()
            if reason is not None and missing():
                raise reason
