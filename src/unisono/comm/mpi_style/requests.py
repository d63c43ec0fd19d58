"""What non-blocking verbs return, and who moves messages on meanwhile.

There is no thread. As in MPI, a rank that waits for one thing looks after all others meanwhile, so
a receive that was posted before a barrier completes inside the barrier.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from unisono.comm import perform
from unisono.comm.health.failures import posted_failure
from unisono.comm.mpi_style.constants import ANY_SOURCE, ANY_TAG

_YIELD_S = 2e-3
"""A wait gives its core away so long before it sleeps: MPI moves data only inside its calls."""
_FIRST_NAP_S = 20e-6
_LAST_NAP_S = 200e-6
_LOOK_S = 0.5
"""Seconds between two looks for failures of other ranks."""


class Mover(Protocol):
    """Something with messages under way."""

    def step(self) -> bool:
        """Do what can be done without waiting; return whether anything was."""
        ...


_movers: set[Mover] = set()
_owner = 0
"""Identity of the thread that moves messages on."""
_is_moving = False


def look_after(mover: Mover, needed: bool) -> None:
    """Let every wait of this thread look after a mover, or no longer."""
    global _owner
    _owner = threading.get_ident()
    (_movers.add if needed else _movers.discard)(mover)
    perform.meanwhile = _meanwhile if _movers else None


def _meanwhile(is_ready: Callable[[], bool], timeout_s: float) -> None:
    """Move messages on in a wait, unless it is one for a message that is being moved on."""
    if not _is_moving and threading.get_ident() == _owner:
        drive(is_ready, timeout_s)


def step() -> bool:
    """Move on what can be moved; return whether anything was."""
    global _is_moving
    _is_moving = True
    try:
        moved = [mover.step() for mover in list(_movers)]
    finally:
        _is_moving = False
    return any(moved)


def drive(is_ready: Callable[[], bool], timeout_s: float) -> None:
    """Move messages on until `is_ready`, nothing is left to do, or the deadline has passed.

    Raises:
        RankFailed: another rank has told that it failed.
    """
    now = time.monotonic()
    give_up, next_look = now + timeout_s, now + _LOOK_S
    sleep_from, nap_s = now + _YIELD_S, _FIRST_NAP_S
    while _movers and not is_ready():
        has_moved, now = step(), time.monotonic()
        if has_moved:
            sleep_from, nap_s = now + _YIELD_S, _FIRST_NAP_S
            continue
        if now > give_up:
            return
        if now > next_look:
            next_look = now + _LOOK_S
            failure = posted_failure()
            if failure is not None:
                raise failure
        if now < sleep_from:
            os.sched_yield()
        else:
            time.sleep(nap_s)
            nap_s = min(nap_s * 1.5, _LAST_NAP_S)


class Status:
    """What is known of a received message: filled by `Recv`, `recv`, and waits of their requests.

    Attributes:
        source: rank that sent the message.
        tag: its tag.
        count: its number of elements (of bytes, for a Python object).
    """

    def __init__(self) -> None:
        self.source = ANY_SOURCE
        self.tag = ANY_TAG
        self.count = 0

    def Get_source(self) -> int:
        """Return the rank that sent the message."""
        return self.source

    def Get_tag(self) -> int:
        """Return the tag of the message."""
        return self.tag

    def Get_count(self) -> int:
        """Return the number of elements of the message."""
        return self.count

    def __repr__(self) -> str:
        return f"Status(source={self.source}, tag={self.tag}, count={self.count})"


class Request:
    """A verb under way; every way to complete it writes the result into the caller's buffer.

    Args:
        is_ready: whether `finish` would not block.
        finish: waits for the end and returns what `Wait` returns; called until it has.
        describe: fills the status of a receive.
    """

    def __init__(
        self,
        is_ready: Callable[[], bool],
        finish: Callable[[], Any] | None,
        describe: Callable[[Status], None] | None = None,
    ) -> None:
        self._is_ready = is_ready
        self._finish = finish
        self._describe = describe
        self._value: Any = None

    @classmethod
    def done(cls) -> Request:
        """Return a request that is complete."""
        return cls(lambda: True, None)

    def Wait(self, status: Status | None = None) -> Any:
        """Return when the verb is complete; a request of `irecv` returns the object."""
        if self._finish is not None:
            self._value = self._finish()
            self._finish = None  # unless it has raised, as it then does again
        if status is not None and self._describe is not None:
            self._describe(status)
        return self._value

    def Test(self, status: Status | None = None) -> bool:
        """Return whether the verb is complete, without waiting."""
        if self._finish is not None:
            step()
            if not self._is_ready():
                return False
        self.Wait(status)
        return True

    @staticmethod
    def Waitall(requests: Iterable[Request]) -> list[Any]:
        """Wait for all `requests`; returns what each of them returns."""
        return [request.Wait() for request in requests]

    wait = Wait
    test = Test
    waitall = Waitall
