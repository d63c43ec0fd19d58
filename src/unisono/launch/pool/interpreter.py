"""Parts of Python's own machinery that have no public name; each with why it is needed.

All were there in every Python from 3.11 to 3.14.
"""

from __future__ import annotations

import atexit
import logging
import subprocess
import sys
import threading
from typing import Any

_STYLES = {"PercentStyle": "%", "StrFormatStyle": "{", "StringTemplateStyle": "$"}


def command(code: str, *words: str) -> list[str]:
    """Return the command of an interpreter with the options of this one (`-O`, `-W`, `-X`, ...).

    `sys.flags` does not tell all of them; multiprocessing uses the same function.
    """
    flags: list[str] = subprocess._args_from_interpreter_flags()  # pyright: ignore[reportAttributeAccessIssue]
    return [sys.executable, *flags, "-c", code, *words]


def join_threads() -> None:
    """Wait for threads that are no daemons, and tell executors, as the interpreter does at exit.

    A rank ends by `os._exit`, which leaves that out.
    """
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]


def run_exit_functions() -> None:
    """Call what was registered with `atexit`, for the same reason."""
    atexit._run_exitfuncs()


def format_of(formatter: logging.Formatter) -> tuple[str | None, str | None, Any]:
    """Return what makes an equal `logging.Formatter`: it does not tell its arguments."""
    style = _STYLES.get(type(formatter._style).__name__, "%")
    return formatter._fmt, formatter.datefmt, style
