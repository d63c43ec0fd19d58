"""The pytest plugin: `@pytest.mark.ranks(n)`, the fixture `rank_pool`, and the hygiene fixture.

Loading it imports neither torch nor cloudpickle; a run without a marked test pays nothing.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest
from _pytest.unittest import TestCaseFunction

from unisono.errors import PlatformError, explain
from unisono.testing import hygiene as hygiene_module
from unisono.testing.hygiene import hygiene, watched_kinds
from unisono.testing.marker import DESCRIPTION, RanksMarker

if TYPE_CHECKING:
    from unisono.testing.pool import RankPool

__all__ = ["hygiene", "rank_backend", "rank_count", "rank_pool"]

_POOL: pytest.StashKey[RankPool] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the settings of the plugin."""
    parser.addini("unisono_rank_timeout", "seconds for a test on ranks", default="20")
    parser.addini(
        "unisono_hygiene", "fail every test that leaves things behind", type="bool", default=False
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers and, if asked for, the hygiene of all tests."""
    config.addinivalue_line("markers", DESCRIPTION)
    config.addinivalue_line("markers", hygiene_module.DESCRIPTION)
    if config.getini("unisono_hygiene"):
        config.pluginmanager.register(hygiene_module.HygieneOfAll(), "unisono-hygiene-of-all")


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the ranks."""
    pool = config.stash.get(_POOL, None)
    if pool is not None:
        pool.close()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test for each number of ranks, and each backend, in the marker's lists."""
    marker = _marker_of(metafunc.definition)
    if marker is not None and marker.many:
        if "rank_count" not in metafunc.fixturenames:
            metafunc.fixturenames.append("rank_count")
        ids = [f"{n}ranks" for n in marker.counts]
        metafunc.parametrize("rank_count", marker.counts, ids=ids)
    if marker is not None and marker.many_backends:
        if "rank_backend" not in metafunc.fixturenames:
            metafunc.fixturenames.append("rank_backend")
        metafunc.parametrize("rank_backend", marker.backends)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin to import torch for the ranks while the first tests run."""
    marked = any(item.get_closest_marker("ranks") for item in session.items)
    if marked and not session.config.option.collectonly:
        session_pool(session.config).warm_up()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse the marker where it would have no effect."""
    if item.get_closest_marker("ranks") and isinstance(item, TestCaseFunction):
        told = explain(
            "@pytest.mark.ranks on a method of unittest.TestCase",
            f"{item.nodeid}, which unittest runs itself, in this process",
            hint="write it as a function, or as a method of a plain class",
        )
        pytest.fail(told, pytrace=False)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> object:
    """Run a marked test on ranks; leave all others to pytest."""
    __tracebackhide__ = True
    marker = _marker_of(pyfuncitem)
    if marker is None:
        return None
    from unisono.testing.runner import run_on_ranks

    pool = session_pool(pyfuncitem.config)
    drawn = getattr(pyfuncitem, "callspec", None)
    params = {} if drawn is None else drawn.params
    count = int(params.get("rank_count", marker.counts[0]))
    backend = str(params.get("rank_backend", marker.backends[0]))
    watch = watched_kinds(pyfuncitem)
    run_on_ranks(pyfuncitem, pool, marker, count, backend, watch=watch)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show a failure of ranks as its own report, without a traceback of this process."""
    report = yield
    hygiene_module.note_phase(item, report)
    error = call.excinfo.value if call.excinfo is not None else None
    if report.failed and _is_own_report(error):
        report.longrepr = _plain_representation(item, error)
    return report


@pytest.fixture(scope="session")
def rank_pool(pytestconfig: pytest.Config) -> RankPool:
    """The session's `RankPool`, the one that marked tests use."""
    return session_pool(pytestconfig)


@pytest.fixture
def rank_count(request: pytest.FixtureRequest) -> int:
    """Number of ranks of this test; 1 without the marker."""
    marker = _marker_of(request.node)
    return 1 if marker is None else marker.counts[0]


@pytest.fixture
def rank_backend(request: pytest.FixtureRequest) -> str:
    """Backend of this test's process group."""
    marker = _marker_of(request.node)
    return "self" if marker is None else marker.backends[0]


def session_pool(config: pytest.Config) -> RankPool:
    """Return the pool of a pytest session, making it the first time."""
    pool = config.stash.get(_POOL, None)
    if pool is None:
        from unisono.testing.pool import RankPool
        from unisono.testing.shipping import TestModules

        pool = config.stash[_POOL] = RankPool()
        pool.by_value = TestModules(config.rootpath).current
    return pool


def pool_holdings(config: pytest.Config) -> set[str]:
    """Name what the session's pool holds in this process."""
    pool = config.stash.get(_POOL, None)
    return set() if pool is None else pool.owned()


def _marker_of(node: pytest.Item) -> RanksMarker | None:
    """Read the marker of a test; a bad one fails it without a traceback of ours."""
    __tracebackhide__ = True
    try:
        return RanksMarker.of(node, float(node.config.getini("unisono_rank_timeout")))
    except PlatformError as error:
        pytest.fail(str(error), pytrace=False)


def _is_own_report(error: BaseException | None) -> bool:
    if error is None:
        return False
    from unisono.testing.report import LeakFound, RankFailure
    from unisono.testing.shipping import CannotTravel

    return isinstance(error, (LeakFound, RankFailure, CannotTravel))


def _plain_representation(item: pytest.Item, error: Any) -> Any:
    from _pytest._code.code import (
        ReprEntryNative,
        ReprExceptionInfo,
        ReprFileLocation,
        ReprTraceback,
    )

    notes = getattr(error, "__notes__", [])
    text = "\n".join([str(error), *notes])
    path, line, _ = item.location
    summary = getattr(error, "summary", "") or str(error).splitlines()[0]
    where = ReprFileLocation(path, (line or 0) + 1, summary)
    traceback = ReprTraceback([ReprEntryNative([text + "\n"])], None, style="native")
    return ReprExceptionInfo(reprtraceback=traceback, reprcrash=where)
