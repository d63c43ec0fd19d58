"""One rank at the terminal: `UNISONO_STDIN_RANK=0` gives rank 0 the launcher's standard input.

So `breakpoint()` works in that rank, and the others pass over theirs. Ranks without a terminal read
nothing.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import NoReturn

from unisono.errors import PlatformError

VARIABLE = "UNISONO_STDIN_RANK"
_STDIN = 0


def stdin_rank(environment: Mapping[str, str], ranks: int) -> int | None:
    """Return the rank that gets the standard input, if one does."""
    text = environment.get(VARIABLE)
    if not text:
        return None
    if not text.isdigit() or int(text) >= ranks:
        raise PlatformError.because(
            f"{VARIABLE}={text}",
            "not a rank of this run",
            f"ranks of a world of {ranks} are 0 to {ranks - 1}",
            f"{VARIABLE}=0",
        )
    return int(text)


@contextmanager
def lent_to(pid: int | None) -> Iterator[None]:
    """Let the process group `pid` read from our terminal, where there is one, inside the block."""
    if pid is None or not os.isatty(_STDIN):
        yield
        return
    _set_foreground(pid)
    try:
        yield
    finally:
        _set_foreground(os.getpgrp())


def _set_foreground(group: int) -> None:
    """Make `group` the one that the terminal listens to; a background process may not, else."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
    try:
        with suppress(OSError):
            os.tcsetpgrp(_STDIN, group)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def settle(rank: int) -> None:
    """In a rank: read the standard input if it is ours, else say so where a debugger would."""
    if os.environ.get(VARIABLE) == str(rank):
        sys.stdin = sys.__stdin__ = open(_STDIN, closefd=False)  # noqa: SIM115
    elif os.environ.get(VARIABLE):
        sys.breakpointhook = _pass_breakpoint
    else:
        sys.breakpointhook = _refuse_breakpoint


def _pass_breakpoint(*_args: object, **_kwargs: object) -> None:
    """Go on: the terminal, and the user's look, are with another rank."""


def _refuse_breakpoint(*_args: object, **_kwargs: object) -> NoReturn:
    rank = os.environ["RANK"]
    raise PlatformError.because(
        f"breakpoint() in rank {rank}",
        "this rank has no terminal",
        None,
        f"{VARIABLE}={rank} gives it yours; or --ranks 1 --on inline, in your own process",
    )
