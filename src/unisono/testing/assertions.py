"""pytest's explanation of unequal values (`At index 1 diff: ...`), for asserts that fail in a rank.

The rewritten asserts travel with the test; the part that explains comparisons needs a pytest
configuration, which a rank does not have. One is made here, the first time a comparison fails.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def show_comparisons(verbosity: int) -> Iterator[None]:
    """Make failing comparisons explain themselves as they do in the test process."""
    try:
        from _pytest.assertion import util
    except ImportError:  # pytest is not needed for RankPool.run
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
