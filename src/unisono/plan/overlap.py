"""How long a rank waits for messages that travel while it computes. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["remaining", "waiting_after_backward", "waiting_in_next_forward"]


def arrivals(ready: Sequence[float], durations: Sequence[float]) -> list[float]:
    """Return when each message has arrived; they go one after the other, each when it is ready.

    >>> arrivals([1.0, 2.0], [3.0, 1.0])
    [4.0, 5.0]
    """
    clock = 0.0
    times: list[float] = []
    for start, duration in zip(ready, durations, strict=True):
        clock = max(clock, start) + duration
        times.append(clock)
    return times


def waiting_after_backward(
    ready: Sequence[float], durations: Sequence[float], backward_s: float, overlap: float
) -> float:
    """Return the wait between backward and an update that needs all messages.

    Args:
        ready: when each can start, counted from the beginning of backward.
        durations: of each, on its own.
        backward_s: end of backward.
        overlap: share of a message's time that costs the computing rank nothing.
    """
    ideal = max(0.0, max(arrivals(ready, durations), default=0.0) - backward_s)
    return remaining(math.fsum(durations), ideal, overlap)


def waiting_in_next_forward(
    ready: Sequence[float],
    durations: Sequence[float],
    needed: Sequence[float],
    backward_s: float,
    overlap: float,
) -> float:
    """Return the wait when each message is needed only in the next forward.

    Args:
        ready: when each can start, counted from the beginning of backward.
        durations: of each, on its own.
        needed: when each is used, counted from the beginning of the next forward.
        backward_s: end of backward.
        overlap: share of a message's time that costs the computing rank nothing.
    """
    late = (
        arrived - backward_s - use
        for arrived, use in zip(arrivals(ready, durations), needed, strict=True)
    )
    return remaining(math.fsum(durations), max(0.0, *late, 0.0), overlap)


def remaining(total_s: float, ideal_s: float, overlap: float) -> float:
    """Return the wait of messages that take `total_s`, `ideal_s` of it with perfect overlap.

    >>> remaining(10.0, 2.0, 1.0), remaining(10.0, 2.0, 0.0)
    (2.0, 10.0)
    """
    return total_s - overlap * (total_s - min(ideal_s, total_s))
