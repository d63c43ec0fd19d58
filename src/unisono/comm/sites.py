"""Where in the user's program a call was made: the first frame outside unisono and torch."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from pathlib import Path
from types import FrameType

import torch

_LIBRARIES: tuple[str, ...] = (
    f"{Path(__file__).resolve().parents[1]}{os.sep}",
    f"{Path(torch.__file__).resolve().parent}{os.sep}",
    contextlib.__file__,
)

_seen: dict[str, bool] = {}
"""For each source file met so far, whether it belongs to a library."""


def call_site() -> str:
    """Return `file:line` of the innermost frame of this thread that is the user's."""
    frame: FrameType | None = sys._getframe(1)
    last = frame
    while frame is not None:
        name = frame.f_code.co_filename
        is_library = _seen.get(name)
        if is_library is None:
            is_library = _seen[name] = name.startswith(_LIBRARIES)
        if not is_library:
            return f"{name}:{frame.f_lineno}"
        last, frame = frame, frame.f_back
    return f"{last.f_code.co_filename}:{last.f_lineno}" if last is not None else "?"


def thread_stacks() -> str:
    """Return the Python stacks of all threads but the caller's, main thread first."""
    me = threading.get_ident()
    main = threading.main_thread().ident
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    parts: list[str] = []
    for ident in sorted(frames, key=lambda i: (i != main, i)):
        if ident == me:
            continue
        stack = "".join(traceback.format_stack(frames[ident])).rstrip()
        parts.append(f"thread {names.get(ident, '?')}:\n{stack}")
    return "\n".join(parts)
