"""The rank's end of the launcher's pipe: orders come in, and its end means the launcher is gone.

A thread reads it from the first moment, so that a rank whose launcher was killed ends itself and
everything it started, also while its main thread waits in a collective.
"""

from __future__ import annotations

import contextlib
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
        on_interrupt: Callable[[float], None] = lambda _seconds: None,
    ) -> None:
        self._fd = control_fd
        self._orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._stop_ordered = threading.Event()
        self._leaving = False
        self._on_request = on_request
        self._on_question = on_question
        self._on_interrupt = on_interrupt
        self._taken: set[signal.Signals] = set()
        threading.Thread(target=self._read_orders, name="unisono-lifeline", daemon=True).start()
        self.take(("SIGTERM",))

    def take(self, signals: Sequence[str]) -> None:
        """Treat these signals as a request to stop, too."""
        for name in signals:
            signal.signal(signal.Signals[name], self._on_term)
            self._taken.add(signal.Signals[name])

    def part_from_children(self, drop: Callable[[], None]) -> None:
        """Have processes forked from this rank (workers of a pool or a loader) begin as plain ones.

        With the rank's handlers they could not be ended by TERM; with its pipes they would hold up
        the news of its end. `drop` lets go of what else belongs to the rank, in the forked process.
        """
        masks: dict[int, set[int]] = {}

        def hold() -> None:
            # A signal that comes before the child has its own handlers would be lost.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, self._taken)
            masks[threading.get_ident()] = before

        def release() -> None:
            signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop(threading.get_ident()))

        def begin_anew() -> None:
            for number in self._taken:
                if signal.getsignal(number) == self._on_term:  # else the user has set another
                    signal.signal(number, signal.SIG_DFL)
            drop_descriptor(self._fd)
            drop()
            release()

        os.register_at_fork(before=hold, after_in_parent=release, after_in_child=begin_anew)

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
                elif order.get("interrupt"):
                    self._on_interrupt(float(order["interrupt"]))
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


def drop_descriptor(fd: int) -> None:
    """Let go of a pipe of the parent process; the number stays taken, for whoever closes it."""
    with contextlib.suppress(OSError):
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, fd, inheritable=False)
        os.close(null)


def kill_own_group() -> None:
    """Kill this process and all of its process group, which is ours alone."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
