"""Where in the user's program a thread stands: frames of unisono, torch and Python left aside."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import traceback
from pathlib import Path
from types import FrameType

import torch

_PACKAGE = Path(__file__).resolve().parents[1]
_LIBRARIES: tuple[str, ...] = (
    f"{_PACKAGE}{os.sep}",
    f"{Path(torch.__file__).resolve().parent}{os.sep}",
    "<frozen ",
)
_PROGRAMS = (str(_PACKAGE / "cli" / "demo_digits.py"), f"{_PACKAGE / '_examples'}{os.sep}")
"""What ships with us and is a user's program all the same."""
_STDLIB = f"{sysconfig.get_path('stdlib')}{os.sep}"
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")

_seen: dict[str, bool] = {}
"""For each source file met so far, whether it belongs to a library."""


def is_library(file: str) -> bool:
    """Whether a source file is unisono's, torch's or Python's own."""
    known = _seen.get(file)
    if known is None:
        is_python = file.startswith(_STDLIB) and not any(word in file for word in _INSTALLED)
        is_ours = file.startswith(_LIBRARIES) and not file.startswith(_PROGRAMS)
        known = _seen[file] = is_python or is_ours
    return known


def call_site(depth: int = 1) -> str:
    """Return `file:line` of the innermost frame of this thread that is the user's.

    `depth` frames above this one are known to be ours; each one not looked at saves time.
    """
    return _innermost(sys._getframe(depth))


def thread_site(ident: int) -> str:
    """Return the same for a thread of this process, which must not have gone on."""
    return _innermost(sys._current_frames().get(ident))


def _innermost(frame: FrameType | None) -> str:
    last = frame
    while frame is not None:
        name = frame.f_code.co_filename
        is_ours = _seen.get(name)
        if is_ours is None:
            is_ours = is_library(name)
        if not is_ours:
            return f"{name}:{frame.f_lineno}"
        last, frame = frame, frame.f_back
    return f"{last.f_code.co_filename}:{last.f_lineno}" if last is not None else "?"


def thread_stacks() -> str:
    """Return the Python stacks of the threads that run the user's code, main thread first.

    Threads of libraries alone are left out. In each stack the user's frames come first, outermost
    at the top; of the libraries only the innermost frame is shown.
    """
    main = threading.main_thread().ident
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts: list[str] = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda t: (t[0] != main, t[0])):
        stack = traceback.extract_stack(frame)
        has_user = any(not is_library(entry.filename) for entry in stack)
        if has_user or ident == main:
            parts.append(f"thread {names.get(ident, '?')}:\n{_arranged(stack)}")
    return "\n".join(parts)


def _arranged(stack: traceback.StackSummary) -> str:
    """Write a stack with the user's frames first."""
    users = [entry for entry in stack if not is_library(entry.filename)]
    text = "".join(traceback.format_list(users))
    innermost = stack[-1]
    if is_library(innermost.filename):
        hidden = len(stack) - len(users)
        plural = "s" if hidden > 1 else ""
        text += f"  {hidden} frame{plural} of libraries, the innermost:\n"
        text += "".join(traceback.format_list([innermost]))
    return text.rstrip()
