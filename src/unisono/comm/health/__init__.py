"""Who failed, who is late, who waits for whom: what ranks learn of each other beside the data."""

from __future__ import annotations

from typing import TypeVar

from unisono.errors import RankFailed, RankTimeout

__all__ = ["mark_as_news"]

E = TypeVar("E", bound=BaseException)


def mark_as_news(error: E) -> E:
    """Mark an error that says no more than that another rank went away or did not come.

    The launcher then knows that the cause lies elsewhere.
    """
    if isinstance(error, (RankFailed, RankTimeout)):
        error.is_news = True  # type: ignore[union-attr]
    return error
