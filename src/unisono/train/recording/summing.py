"""The trace of a recorded run: sums over all collectives, and the latest of them in full."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from unisono.comm.call import Call
from unisono.comm.health.trace import Recorder

KEPT_EVENTS = 10_000
"""Collectives of a rank that are kept in full, in small worlds; sums are over all."""
KEPT_IN_WORLD = 200_000
"""The same, of all ranks together."""


class SummingRecorder(Recorder):
    """Adds up every collective of this process, so that a long run needs no more memory."""

    def __init__(self, before: Recorder | None, ranks: int = 1) -> None:
        super().__init__()
        self._raw = deque(maxlen=max(500, min(KEPT_EVENTS, KEPT_IN_WORLD // ranks)))
        self.before = before
        """What recorded before; it goes on, and is put back at the end."""
        self._sums: dict[tuple[str, str], list[int]] = {}
        self.blocked_ns = 0
        """Time this rank spent in collectives; of asynchronous ones only the wait counts."""
        self.wait_ns = 0
        """The part of it that was waiting for other ranks."""

    def add(self, call: Call, rank: int) -> None:
        """Take down a call that has just ended."""
        now = time.perf_counter_ns()
        self._raw.append((call, rank, now))
        took = now - call.t_start
        blocked = call.wait_ns if call.is_async else took
        self.blocked_ns += blocked
        self.wait_ns += min(call.wait_ns, blocked)
        sums = self._sums.setdefault((call.op, call._site or ""), [0, 0, 0, 0])
        sums[0] += 1
        sums[1] += call.sent + call.received
        sums[2] += blocked
        sums[3] += min(call.wait_ns, blocked)
        if self.before is not None:
            self.before.add(call, rank)

    def sums(self) -> list[dict[str, Any]]:
        """Return calls, bytes and times for each operation and source line."""
        names = ("calls", "bytes", "blocked_ns", "wait_ns")
        return [
            {"op": op, "site": site, **dict(zip(names, values, strict=True))}
            for (op, site), values in list(self._sums.items())
        ]
