"""TERM and HUP to a launcher end its ranks too, as Ctrl-C does, before they end the launcher."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class _Terminated(BaseException):
    def __init__(self, number: int) -> None:
        self.number = number


@contextmanager
def termination_as_exception() -> Iterator[None]:
    """Turn TERM and HUP into an exception inside the block, and obey them after it.

    Signals that the program handles itself are left alone, and so are all outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    taken = [number for number in _SIGNALS if signal.getsignal(number) is signal.SIG_DFL]

    def raise_it(number: int, _frame: FrameType | None) -> None:
        raise _Terminated(number)

    for number in taken:
        signal.signal(number, raise_it)
    received: int | None = None
    try:
        yield
    except _Terminated as order:
        received = order.number
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)
    if received is not None:
        os.kill(os.getpid(), received)
