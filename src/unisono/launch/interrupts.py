"""What Ctrl-C, TERM and HUP mean to a launcher: its ranks end, too, before it does.

The first Ctrl-C asks whoever supervises the ranks to let them save and end; the second ends them
at once. TERM and HUP end them as an error does.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_listener: Callable[[], None] | None = None
"""Who is told of the first Ctrl-C, instead of the exception."""


class _Terminated(BaseException):
    def __init__(self, number: int) -> None:
        self.number = number


@contextmanager
def signals_of_launcher() -> Iterator[None]:
    """Turn TERM and HUP into an exception inside the block, and obey them after it.

    The first Ctrl-C is told to whoever listens, see `first_told_to`; it is a `KeyboardInterrupt`
    where nobody does, and the second is one always. Later ones change nothing: all ranks are being
    killed. Signals that the program handles itself are left alone, and so are all outside the main
    thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    taken = [number for number in _SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    takes_interrupts = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    raised = 0
    was_told = False

    def raise_it(number: int, _frame: FrameType | None) -> None:
        raise _Terminated(number)

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        nonlocal raised, was_told
        if _listener is not None and not was_told and not raised:
            was_told = True
            _listener()
        elif raised < (1 if was_told else 2):
            raised += 1
            raise KeyboardInterrupt

    for number in taken:
        signal.signal(number, raise_it)
    if takes_interrupts:
        signal.signal(signal.SIGINT, interrupt)
    received: int | None = None
    try:
        yield
    except _Terminated as order:
        received = order.number
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)
        if takes_interrupts:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    if received is not None:
        os.kill(os.getpid(), received)


@contextmanager
def first_told_to(listener: Callable[[], None]) -> Iterator[None]:
    """Have `listener` called at the first Ctrl-C inside the block, in the midst of whatever runs.

    Only for the main thread: others do not get signals.
    """
    global _listener
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before


def announce(seconds: float) -> None:
    """Say what the first Ctrl-C has begun."""
    print(
        f"\nunisono: interrupted; the ranks have {seconds:g} s to save and end "
        "(Ctrl-C again kills them)",
        file=sys.stderr,
        flush=True,
    )
