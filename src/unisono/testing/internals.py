"""Parts of pytest and hypothesis that have no public name; each with why it is needed.

Seen to work with pytest 8.2 to 9 and hypothesis 6.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

_SETTINGS = "_hypothesis_internal_use_settings"


def is_unittest(item: pytest.Item) -> bool:
    """Whether a test is a method of a `unittest.TestCase`, which pytest runs in its own way."""
    from _pytest.unittest import TestCaseFunction

    return isinstance(item, TestCaseFunction)


def argument_names(item: pytest.Function) -> tuple[str, ...]:
    """Return the fixtures that the test function takes; `fixturenames` has all that are in use."""
    return item._fixtureinfo.argnames


def fixture_value(item: pytest.Function, fixture: str) -> Any:
    """Return a fixture that the test function does not name; call it while the test runs."""
    return item._request.getfixturevalue(fixture)


def plain_representation(item: pytest.Item, error: BaseException, summary: str) -> Any:
    """Return a report of pytest that shows a text as it is, under the line of the test."""
    from _pytest._code.code import (
        ReprEntryNative,
        ReprExceptionInfo,
        ReprFileLocation,
        ReprTraceback,
    )

    text = "\n".join([str(error), *getattr(error, "__notes__", [])])
    path, line, _ = item.location
    where = ReprFileLocation(path, (line or 0) + 1, summary)
    traceback = ReprTraceback([ReprEntryNative([text + "\n"])], None, style="native")
    return ReprExceptionInfo(reprtraceback=traceback, reprcrash=where)


@contextlib.contextmanager
def comparisons_explained(verbosity: int) -> Iterator[None]:
    """Let failing comparisons explain themselves here, in a rank, as in the test process.

    Rewritten asserts ask a function that pytest sets around each test, in its own process.
    """
    try:
        from _pytest.assertion import util
    except ImportError:  # ranks of a pool need no pytest
        yield
        return
    before = util._reprcompare
    util._reprcompare = functools.partial(_explain, verbosity)
    try:
        yield
    finally:
        util._reprcompare = before


def _explain(verbosity: int, op: str, left: object, right: object) -> str | None:
    try:
        config = _configuration(verbosity)
        answers = config.hook.pytest_assertrepr_compare(
            config=config, op=op, left=left, right=right
        )
        lines = next((answer for answer in answers if answer), None)
    except Exception:  # the plain form of the comparison is still shown
        return None
    if lines is None:
        return None
    return "\n~".join(line.replace("\n", "\\n") for line in lines).replace("%", "%%")


@functools.cache
def _configuration(verbosity: int) -> Any:
    from _pytest.config import get_config

    before = dict(os.environ)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.environ.pop("PYTEST_ADDOPTS", None)
    os.environ.pop("PYTEST_PLUGINS", None)
    try:
        config = get_config()
        config.parse(["-c", os.devnull, "--rootdir", os.sep, "-p", "no:cacheprovider"])
        config.option.verbose = verbosity
        return config
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def drawn_by(function: Callable[..., Any], inner: Callable[..., Any]) -> Iterator[None]:
    """Let a hypothesis test draw for `inner` instead of its own body, without its time limit.

    The body can be replaced in public, but not the settings of a test that is decorated already.
    The phase "explain" is left out: it traces lines of this process, which are none of the test's.
    """
    from hypothesis import Phase, settings

    handle = function.hypothesis  # pyright: ignore[reportFunctionMemberAccess]
    body, handle.inner_test = handle.inner_test, inner
    owner = getattr(function, "__func__", function)
    before = getattr(owner, _SETTINGS, None)
    if before is not None:
        phases = [phase for phase in before.phases if phase is not Phase.explain]
        setattr(owner, _SETTINGS, settings(before, deadline=None, phases=phases))
    try:
        yield
    finally:
        handle.inner_test = body
        if before is not None:
            setattr(owner, _SETTINGS, before)
