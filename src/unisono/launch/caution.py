"""Warnings that point at the user's own line, however deep in the launcher they arise."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import FrameType

_PACKAGE = str(Path(__file__).resolve().parents[1])


def warn(message: str) -> None:
    """Issue a `RuntimeWarning` at the innermost frame that is not of this package."""
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
        level += 1
    warnings.warn(message, RuntimeWarning, stacklevel=level)
