"""An exception of a rank as text, without the frames of the test bench itself.

Frames that set `__tracebackhide__` (pytest's word for "not interesting") are left out too.
"""

from __future__ import annotations

import sys
import traceback
import unittest
from pathlib import Path
from typing import Any

from unisono.testing.messages import Raised

_BENCH = Path(__file__).absolute().parent
_BENCH_FILES = tuple(
    str(_BENCH / name) for name in ("rank_main.py", "warm.py", "runner.py", "drawn.py")
)


def is_bench_file(filename: str) -> bool:
    """Whether a source file is part of the machinery that runs ranks."""
    return filename.startswith(_BENCH_FILES)


def describe_exception(error: BaseException) -> Raised:
    """Return what a rank tells the pool about `error`."""
    told = traceback.TracebackException.from_exception(error)
    _hide_frames(told, error, set())
    text = "".join(told.format())
    summary = "".join(told.format_exception_only()).strip()
    outcome, reason = _outcome(error)
    return Raised(text=text, summary=summary, outcome=outcome, reason=reason)


def _hide_frames(told: traceback.TracebackException, error: BaseException, seen: set[int]) -> None:
    seen.add(id(error))
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if len(frames) == len(told.stack):
        kept = [
            entry
            for entry, frame in zip(told.stack, frames, strict=True)
            if not is_bench_file(entry.filename) and not frame.f_locals.get("__tracebackhide__")
        ]
        told.stack[:] = kept
    for inner, cause in ((told.__cause__, error.__cause__), (told.__context__, error.__context__)):
        if inner is not None and cause is not None and id(cause) not in seen:
            _hide_frames(inner, cause, seen)


def _outcome(error: BaseException) -> tuple[str, str]:
    """Tell a wish to skip from a failure."""
    outcomes: Any = sys.modules.get("_pytest.outcomes")
    if outcomes is not None and isinstance(error, (outcomes.Skipped, unittest.SkipTest)):
        return "skip", str(error)
    if outcomes is not None and isinstance(error, outcomes.XFailed):
        return "xfail", str(error)
    if type(error).__name__ == "UnsatisfiedAssumption":
        return "assume", ""
    return "error", ""
