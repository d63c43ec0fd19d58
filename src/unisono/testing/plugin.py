"""The pytest plugin: `@pytest.mark.ranks(n)`, the fixture `rank_pool`, and the hygiene fixture.

Loading it imports neither torch nor cloudpickle; a run without a marked test pays nothing.

Under hypothesis the test process draws and shrinks, and the ranks run: for each example the drawn
values are sent to all ranks, which run the inner test in one lasting process group. So all ranks
see the same values, and shrinking works as in a plain test.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import unittest
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from unisono.errors import PlatformError, explain
from unisono.expect import is_integer
from unisono.testing.internals import (
    argument_names,
    drawn_by,
    fixture_value,
    is_unittest,
    plain_representation,
)
from unisono.testing.leaks import KINDS, Holdings, describe

if TYPE_CHECKING:
    from unisono.testing.pool import RankPool, RankStall, UnanimousOutcome

__all__ = ["hygiene", "rank_backend", "rank_count", "rank_pool"]

REMADE_FIXTURES = ("monkeypatch",)
"""Fixtures that act on the process they live in, so each rank makes its own."""
SHRINK_GRACE_S = 0.3
"""Grace after a first failure while hypothesis looks for the smallest example."""
_POOL: pytest.StashKey[RankPool] = pytest.StashKey()
_FAILED: pytest.StashKey[bool] = pytest.StashKey()
_RANKS = (
    'ranks(n, timeout=20, backend="gloo"): run the test body on n ranks, each with a default '
    "process group; a list of n, or of backends, runs the test once for each"
)
_LEAKS = (
    "leaks(*kinds): kinds of things this test may leave behind, out of "
    f"{', '.join(KINDS)}, settings; all of them when none is named"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the settings of the plugin."""
    parser.addini("unisono_rank_timeout", "seconds for a test on ranks", default="20")
    parser.addini(
        "unisono_preload",
        "modules that take long to import, loaded once for all ranks of all tests",
        type="linelist",
        default=[],
    )
    parser.addini(
        "unisono_hygiene", "fail every test that leaves things behind", type="bool", default=False
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers and, if asked for, the hygiene of all tests."""
    config.addinivalue_line("markers", _RANKS)
    config.addinivalue_line("markers", _LEAKS)
    if config.getini("unisono_hygiene"):
        config.pluginmanager.register(HygieneOfAll(), "unisono-hygiene-of-all")


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the ranks."""
    pool = config.stash.get(_POOL, None)
    if pool is not None:
        pool.close()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test for each number of ranks, and each backend, in the marker's lists."""
    marker = _marker_of(metafunc.definition)
    for name, values in marker.listed.items() if marker is not None else ():
        if name not in metafunc.fixturenames:
            metafunc.fixturenames.append(name)
        ids = [f"{value}ranks" if is_integer(value) else value for value in values]
        metafunc.parametrize(name, values, ids=ids)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin to import torch for the ranks while the first tests run."""
    marked = any(item.get_closest_marker("ranks") for item in session.items)
    if marked and not session.config.option.collectonly:
        session_pool(session.config).warm_up()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse the marker where it would have no effect."""
    if item.get_closest_marker("ranks") and is_unittest(item):
        text = explain(
            "@pytest.mark.ranks on a method of unittest.TestCase",
            f"{item.nodeid}, which unittest runs itself, in this process",
            hint="write it as a function, or as a method of a plain class",
        )
        pytest.fail(text, pytrace=False)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> object:
    """Run a marked test on ranks; leave all others to pytest."""
    __tracebackhide__ = True
    marker = _marker_of(pyfuncitem)
    if marker is None:
        return None
    leaks = run_on_ranks(pyfuncitem, marker)
    watch = watched_kinds(pyfuncitem)
    lines: list[str] = []
    for rank, entries in leaks.items():
        if watched := {kind: items for kind, items in entries.items() if kind in watch}:
            lines.append(f"rank {rank}:\n{describe(watched)}")
    if lines:
        from unisono.testing.report import LeakFound

        raise LeakFound("\n".join(["the test left things behind on its ranks", *lines]))
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show a failure of ranks as its own report, without a traceback of this process."""
    report = yield
    if report.when == "call" and report.failed:
        item.stash[_FAILED] = True
    error = call.excinfo.value if call.excinfo is not None else None
    if error is not None and report.failed and _is_own_report(error):
        summary = getattr(error, "summary", "") or str(error).splitlines()[0]
        report.longrepr = plain_representation(item, error, summary)
    return report


@pytest.fixture(scope="session")
def rank_pool(pytestconfig: pytest.Config) -> RankPool:
    """The session's `RankPool`, the one that marked tests use.

    Where a conftest.py overrides it, marked tests below use the pool that it returns.
    """
    return session_pool(pytestconfig)


@pytest.fixture
def rank_count(request: pytest.FixtureRequest) -> int:
    """Number of ranks of this test; 1 without the marker."""
    marker = _marker_of(request.node)
    return 1 if marker is None else marker.count


@pytest.fixture
def rank_backend(request: pytest.FixtureRequest) -> str:
    """Backend of this test's process group."""
    marker = _marker_of(request.node)
    return "self" if marker is None else marker.backend


def session_pool(config: pytest.Config) -> RankPool:
    """Return the pool of a pytest session, making it the first time."""
    pool = config.stash.get(_POOL, None)
    if pool is None:
        from unisono.testing.pool import RankPool
        from unisono.testing.shipping import TestModules

        pool = config.stash[_POOL] = RankPool(preload=config.getini("unisono_preload"))
        pool.by_value = TestModules(config.rootpath).current
    return pool


def _marker_of(node: pytest.Item) -> RanksMarker | None:
    """Read the closest marker of a test; a bad one fails it without a traceback of ours."""
    __tracebackhide__ = True
    mark = node.get_closest_marker("ranks")
    if mark is None:
        return None
    try:
        return RanksMarker.read(mark, float(node.config.getini("unisono_rank_timeout")))
    except PlatformError as error:
        pytest.fail(str(error), pytrace=False)


def _is_own_report(error: BaseException) -> bool:
    from unisono.testing.report import LeakFound, RankFailure
    from unisono.testing.shipping import CannotTravel

    return isinstance(error, (LeakFound, RankFailure, CannotTravel))


@dataclass(frozen=True, kw_only=True)
class RanksMarker:
    """What a `ranks` marker asks for."""

    count: int
    """Number of ranks."""
    backend: str
    """Backend of the process group."""
    timeout_s: float
    """Seconds for the body of the test (for each drawn example under hypothesis)."""
    listed: Mapping[str, tuple[Any, ...]]
    """Fixture -> values, where a list of counts or backends was given: one test for each."""

    @classmethod
    def read(cls, mark: pytest.Mark, default_timeout_s: float) -> RanksMarker:
        """Read a marker.

        Raises:
            PlatformError: the arguments make no sense.
        """
        options = dict(mark.kwargs)
        timeout_s = options.pop("timeout", default_timeout_s)
        values: dict[str, Any] = {"rank_count": mark.args[0] if len(mark.args) == 1 else None}
        values["rank_backend"] = options.pop("backend", "gloo")
        listed = {
            name: tuple(value)
            for name, value in values.items()
            if isinstance(value, Sequence) and not isinstance(value, str)
        }
        counts, backends = (listed.get(name, (value,)) for name, value in values.items())
        fits = (
            bool(counts)
            and all(is_integer(n) and n >= 1 for n in counts)
            and isinstance(timeout_s, (int, float))
            and timeout_s > 0
            and bool(backends)
            and all(isinstance(name, str) for name in backends)
            and not options
        )
        if not fits:
            said = [repr(a) for a in mark.args] + [f"{k}={v!r}" for k, v in mark.kwargs.items()]
            raise PlatformError.because(
                f"@pytest.mark.ranks({', '.join(said)})",
                "it takes a number of ranks, a timeout and a backend (lists of the first and last)",
                hint='@pytest.mark.ranks(2, timeout=20, backend="gloo")',
            )
        return cls(count=counts[0], backend=backends[0], timeout_s=float(timeout_s), listed=listed)


@pytest.fixture
def hygiene(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test if it leaves something behind in this process."""
    from unisono.testing.report import LeakFound

    kinds = [kind for kind in KINDS if kind in watched_kinds(request.node)]
    before = Holdings.now(kinds)
    yield
    if request.node.stash.get(_FAILED, False):
        return  # its traceback may keep things alive, and one failure is enough
    pool = request.node.stash.get(_POOL, request.config.stash.get(_POOL, None))
    leaks = before.new(ignore=() if pool is None else pool.owned())
    if leaks:
        raise LeakFound(f"the test left things behind\n{describe(leaks)}")


class HygieneOfAll:
    """A plugin that gives every test the fixture `hygiene`."""

    @pytest.fixture(autouse=True)
    def unisono_hygiene_of_all(self, hygiene: None) -> None:
        """Ask for `hygiene`."""


def watched_kinds(node: pytest.Item) -> set[str]:
    """Kinds of leaks that fail this test; none without the fixture."""
    if "hygiene" not in getattr(node, "fixturenames", ()):
        return set()
    kinds = {*KINDS, "settings"}
    for mark in node.iter_markers("leaks"):
        kinds -= set(mark.args) if mark.args else kinds
    return kinds


def run_on_ranks(item: pytest.Function, marker: RanksMarker) -> dict[int, dict[str, list[str]]]:
    """Run the body of `item`, whose fixtures are ready, on ranks; return what each left behind.

    Raises:
        RankFailure: ranks raised, died or did not come back.
    """
    __tracebackhide__ = True
    from unisono.testing.pool import UnanimousOutcome

    pool: RankPool = fixture_value(item, "rank_pool")
    item.stash[_POOL] = pool
    function = item.obj
    params: dict[str, Any] = dict(item.callspec.params) if hasattr(item, "callspec") else {}
    names = argument_names(item)
    fixtures = {n: item.funcargs[n] for n in names if n not in REMADE_FIXTURES}
    remake = tuple(n for n in names if n in REMADE_FIXTURES)
    verbosity = item.config.get_verbosity(pytest.Config.VERBOSITY_ASSERTIONS)
    is_drawn = getattr(function, "is_hypothesis_test", False) and hasattr(function, "hypothesis")
    size = int(params.get("rank_count", marker.count))
    backend = str(params.get("rank_backend", marker.backend))

    def call(body: Callable[..., Any], kwargs: dict[str, Any]) -> None:
        __tracebackhide__ = True
        lasting = {name: value for name, value in kwargs.items() if name in fixtures}
        changing = {name: value for name, value in kwargs.items() if name not in fixtures}
        try:
            world.call(
                body,
                (),
                lasting,
                drawn=changing if is_drawn else None,
                remake=remake,
                verbosity=verbosity,
            )
        except UnanimousOutcome as wish:
            _pass_on(wish)

    grace_s = pool.grace_s
    with pool.open(size, timeout=marker.timeout_s, backend=backend) as world:
        try:
            if is_drawn:
                world.open()  # before the first example, so that none has to wait for it
                pool.grace_s = min(grace_s, SHRINK_GRACE_S)
                with drawn_on_ranks(function, call):
                    function(**fixtures, **dict.fromkeys(remake))
            else:
                call(function, fixtures)
        except (pytest.skip.Exception, pytest.xfail.Exception):
            world.close()  # all ranks agreed, so they are well
            raise
        except StopDrawing as stop:
            raise stop.stall from None
        finally:
            pool.grace_s = grace_s
        world.echo()
        return world.close()


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


@contextlib.contextmanager
def drawn_on_ranks(
    function: Callable[..., Any], run: Callable[[Callable[..., Any], dict[str, Any]], None]
) -> Iterator[None]:
    """Let the inner test of a hypothesis test be run by `run(inner, drawn values)`.

    The time limit of hypothesis is lifted meanwhile: the deadline of the marker holds for each
    example, and time on ranks that share cores says nothing about the example.
    """
    from unisono.testing.pool import RankStall

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
