"""Hygiene of tests: a test that leaves a thread, a file, a variable, ... behind fails.

Ask for the fixture `hygiene`, or set `unisono_hygiene = true` in pytest's configuration for all
tests. Marked tests are watched in this process and in each of their ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from unisono.testing.leaks import KINDS, Holdings, describe

DESCRIPTION = (
    "leaks(*kinds): kinds of things this test may leave behind, out of "
    f"{', '.join(KINDS)}, settings; all of them when none is named"
)

_FAILED: pytest.StashKey[bool] = pytest.StashKey()


@pytest.fixture
def hygiene(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test if it leaves something behind in this process."""
    from unisono.testing.plugin import pool_holdings
    from unisono.testing.report import LeakFound

    kinds = [kind for kind in KINDS if kind in watched_kinds(request.node)]
    before = Holdings.now(kinds)
    yield
    if request.node.stash.get(_FAILED, False):
        return  # its traceback may keep things alive, and one failure is enough
    leaks = before.new(ignore=pool_holdings(request.config))
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


def note_phase(item: pytest.Item, report: pytest.TestReport) -> None:
    """Remember that a test failed before its fixtures end."""
    if report.when == "call" and report.failed:
        item.stash[_FAILED] = True
