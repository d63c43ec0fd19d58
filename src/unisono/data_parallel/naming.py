"""Tells in an error of a collective what was to travel with it."""

from __future__ import annotations

from unisono.errors import CollectiveMismatch, RankTimeout

Unfinished = (CollectiveMismatch, RankTimeout)
"""Errors of a collective in which ranks did not come together."""

_HINT = "samples() and join() go around the same backwards on all ranks, or on none"


def named(error: CollectiveMismatch | RankTimeout, what: str) -> CollectiveMismatch | RankTimeout:
    """Return the error with `what` was to travel in front, and why ranks may disagree about it."""
    hint = f"\n  HINT: {_HINT}" if isinstance(error, CollectiveMismatch) else ""
    told = type(error)(f"{what}\n{error}{hint}")
    told.__dict__.update(error.__dict__)
    return told
