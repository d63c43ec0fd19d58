"""Tests drawn by hypothesis on ranks: the test process draws and shrinks, the ranks run.

For each example the drawn values are sent to all ranks, which run the inner test in one lasting
process group. So all ranks see the same values, and shrinking works as in a plain test.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from unisono.testing.rank_world import RankStall

SHRINK_GRACE_S = 0.3
"""Grace after a first failure while hypothesis looks for the smallest example."""


class StopDrawing(BaseException):
    """Carries a stall past hypothesis: every further example would cost a whole deadline.

    Attributes:
        stall: the report.
    """

    def __init__(self, stall: RankStall) -> None:
        super().__init__(str(stall))
        self.stall = stall


def is_drawn(function: Callable[..., Any]) -> bool:
    """Whether `@given` made this test."""
    return bool(getattr(function, "is_hypothesis_test", False)) and hasattr(function, "hypothesis")


@contextlib.contextmanager
def drawn_on_ranks(
    function: Callable[..., Any], run: Callable[[Callable[..., Any], dict[str, Any]], None]
) -> Iterator[None]:
    """Let the inner test of a hypothesis test be run by `run(inner, drawn values)`.

    The time limit of hypothesis is lifted meanwhile: the deadline of the marker holds for each
    example, and time on ranks that share cores says nothing about the example.
    """
    from hypothesis import Phase, settings

    handle = function.hypothesis  # pyright: ignore[reportFunctionMemberAccess]
    inner = handle.inner_test
    owner = getattr(function, "__func__", function)
    name = "_hypothesis_internal_use_settings"
    before = getattr(owner, name, None)

    @functools.wraps(inner)
    def on_ranks(*args: Any, **drawn: Any) -> None:
        __tracebackhide__ = True
        values = dict(zip(inspect.signature(inner).parameters, args, strict=False)) | drawn
        try:
            run(inner, values)
        except RankStall as stall:
            shown = ", ".join(f"{k}={v!r}" for k, v in values.items() if k != "self")
            stall.add_note(f"Stalled example (not shrunk): {inner.__name__}({shown})")
            raise StopDrawing(stall) from None

    handle.inner_test = on_ranks
    if before is not None:
        # The phase "explain" traces lines of this process, which are none of the test's.
        phases = [phase for phase in before.phases if phase is not Phase.explain]
        setattr(owner, name, settings(before, deadline=None, phases=phases))
    try:
        yield
    finally:
        handle.inner_test = inner
        if before is not None:
            setattr(owner, name, before)
