"""The rank's end of the launcher's pipe: orders come in, and its end means the launcher is gone.

A thread reads it from the first moment, so that a rank whose launcher was killed ends itself and
everything it started, also while its main thread waits in a collective.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

_NOTICE_S = 0.1


class Stopped(BaseException):
    """Raised in the rank's main thread when the launcher stops it, so `finally` blocks run."""


class Lifeline:
    """Reads the launcher's orders in a thread of its own."""

    def __init__(
        self,
        control_fd: int,
        on_request: Callable[[], None],
        on_question: Callable[[], None] = lambda: None,
    ) -> None:
        self._fd = control_fd
        self._orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._stop_ordered = threading.Event()
        self._leaving = False
        self._on_request = on_request
        self._on_question = on_question
        threading.Thread(target=self._read_orders, name="unisono-lifeline", daemon=True).start()
        signal.signal(signal.SIGTERM, self._on_term)

    def take(self, signals: Sequence[str]) -> None:
        """Treat these signals as a request to stop, too."""
        for name in signals:
            signal.signal(signal.Signals[name], self._on_term)

    def wait_for(self, key: str, *, timeout_s: float) -> Any:
        """Return the value of the next order that has `key`; raise `queue.Empty` after a while."""
        give_up = time.monotonic() + timeout_s
        while True:
            order = self._orders.get(timeout=max(0.0, give_up - time.monotonic()))
            if key in order:
                return order[key]

    def leave(self) -> None:
        """From now on a stop is no news: the rank is leaving by itself."""
        self._leaving = True

    def _read_orders(self) -> None:
        with os.fdopen(self._fd, "rb") as pipe:
            for line in pipe:
                order = json.loads(line)
                if order.get("stop"):
                    self._stop_ordered.set()
                elif order.get("where"):
                    self._on_question()
                    continue
                self._orders.put(order)
        if not self._leaving:
            kill_own_group()
        self._orders.put({"stop": True})

    def _on_term(self, _signum: int, _frame: FrameType | None) -> None:
        """Raise `Stopped` if the launcher asked for the end; else note that somebody wants it.

        Whoever sends TERM to a rank (a scheduler, `simulate_preemption`) gives it time to save.
        """
        if self._leaving:
            return
        if self._stop_ordered.wait(_NOTICE_S):
            raise Stopped
        self._on_request()


def kill_own_group() -> None:
    """Kill this process and all of its process group, which is ours alone."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
