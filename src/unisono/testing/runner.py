"""Runs one marked test on the ranks of the pool and turns what they did into a pytest outcome.

Under hypothesis the test process draws and shrinks, and the ranks run: for each example the drawn
values are sent to all ranks, which run the inner test in one lasting process group. So all ranks
see the same values, and shrinking works as in a plain test.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import unittest
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import pytest

from unisono.testing.internals import argument_names, drawn_by
from unisono.testing.leaks import describe
from unisono.testing.plugin import RanksMarker
from unisono.testing.pool import RankPool, RankStall, RankWorld, UnanimousOutcome
from unisono.testing.report import LeakFound

REMADE_FIXTURES = ("monkeypatch",)
"""Fixtures that act on the process they live in, so each rank makes its own."""
SHRINK_GRACE_S = 0.3
"""Grace after a first failure while hypothesis looks for the smallest example."""


def run_on_ranks(
    item: pytest.Function,
    pool: RankPool,
    marker: RanksMarker,
    count: int,
    backend: str,
    *,
    watch: set[str],
) -> None:
    """Run the body of `item` on `count` ranks.

    Args:
        item: the test; its fixtures are ready.
        pool: where the ranks come from.
        marker: the deadline.
        count: number of ranks.
        backend: backend of their process group.
        watch: kinds of leaks in the ranks that fail the test.

    Raises:
        RankFailure: ranks raised, died or did not come back.
        LeakFound: the test passed, but a rank was not left clean.
    """
    __tracebackhide__ = True
    names = argument_names(item)
    fixtures = {n: item.funcargs[n] for n in names if n not in REMADE_FIXTURES}
    remake = tuple(n for n in names if n in REMADE_FIXTURES)
    verbosity = item.config.get_verbosity(pytest.Config.VERBOSITY_ASSERTIONS)
    grace_s = pool.grace_s
    function = item.obj
    kind = "drawn value or fixture" if is_drawn(function) else "fixture"
    world = RankWorld(pool, count, timeout_s=marker.timeout_s, backend=backend)

    def call(body: Callable[..., Any], kwargs: dict[str, Any]) -> None:
        __tracebackhide__ = True
        lasting = {name: value for name, value in kwargs.items() if name in fixtures}
        changing = {name: value for name, value in kwargs.items() if name not in fixtures}
        try:
            world.call(
                body,
                (),
                lasting,
                drawn=changing if is_drawn(function) else None,
                remake=remake,
                keep=False,
                kind=kind,
                verbosity=verbosity,
            )
        except UnanimousOutcome as wish:
            _pass_on(wish)

    try:
        if is_drawn(function):
            world.open()  # before the first example, so that none has to wait for it
            pool.grace_s = min(grace_s, SHRINK_GRACE_S)
            with drawn_on_ranks(function, call):
                function(**fixtures, **dict.fromkeys(remake))
        else:
            call(function, fixtures)
        world.echo()
        leaks = {
            rank: {kind: items for kind, items in found.items() if kind in watch}
            for rank, found in world.close().items()
        }
    except (pytest.skip.Exception, pytest.xfail.Exception):
        world.close()  # all ranks agreed, so they are well
        raise
    except StopDrawing as stop:
        raise stop.stall from None
    finally:
        pool.grace_s = grace_s
        world.abandon()
    lines = [f"rank {rank}:\n{describe(found)}" for rank, found in leaks.items() if found]
    if lines:
        raise LeakFound("\n".join(["the test left things behind on its ranks", *lines]))


def _pass_on(wish: UnanimousOutcome) -> NoReturn:
    __tracebackhide__ = True
    if wish.outcome == "skip":
        raise pytest.skip.Exception(wish.reason, _use_item_location=True)
    if wish.outcome == "xfail":
        raise pytest.xfail.Exception(wish.reason)
    if wish.outcome == "assume":
        from hypothesis import reject

        reject()
    raise unittest.SkipTest(wish.reason)


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
    inner = function.hypothesis.inner_test  # pyright: ignore[reportFunctionMemberAccess]

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

    with drawn_by(function, on_ranks):
        yield
