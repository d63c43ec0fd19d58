"""Between a failed attempt and the next: how long to wait, and what the console is told."""

from __future__ import annotations

LONGEST_S = 30.0
"""Longest wait before another attempt."""


def pause_s(failures: int) -> float:
    """Return the seconds before the attempt that follows so many failed ones: 1, 2, 4, ...

    >>> [pause_s(failures) for failures in (1, 2, 9)]
    [1.0, 2.0, 30.0]
    """
    return min(LONGEST_S, 2.0 ** (failures - 1))


def announcement(cause: str, *, attempts: int, limit: int, failures: int) -> str:
    """Return the line that says why there is another attempt, and when.

    Args:
        cause: what went wrong.
        attempts: how many there were, the failed one included.
        limit: how many there may be.
        failures: how many of them failed.
    """
    begin = f"attempt {attempts + 1} of {limit} begins in {pause_s(failures):.0f} s"
    return f"unisono: {cause.splitlines()[0]}; {begin}"
