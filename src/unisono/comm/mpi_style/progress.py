"""Who moves messages on: every wait of an MPI-style communicator does, for all of them.

There is no thread. As in MPI, a rank that waits for one thing looks after all others meanwhile, so
a receive that was posted before a barrier completes inside the barrier.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from unisono.comm.health.failures import posted_failure

_FIRST_NAP_S = 50e-6
_LAST_NAP_S = 2e-3
_LOOK_S = 0.5
"""Seconds between two looks for failures of other ranks."""


Check = Callable[[], bool]


class Mover(Protocol):
    """Something with messages under way."""

    def step(self) -> bool:
        """Do what can be done without waiting; return whether anything was."""
        ...


_movers: set[Mover] = set()


def attend(mover: Mover, is_busy: bool) -> None:
    """Look after `mover` from now on, or no longer."""
    if is_busy:
        _movers.add(mover)
    else:
        _movers.discard(mover)


def is_needed() -> bool:
    """Whether messages are under way that a blocking call has to look after."""
    return bool(_movers)


def step() -> bool:
    """Move on what can be moved; return whether anything was."""
    moved = [mover.step() for mover in list(_movers)]
    return any(moved)


def drive(is_ready: Check, timeout_s: float | None) -> None:
    """Move messages on until `is_ready`, nothing is left to do, or the deadline has passed.

    Raises:
        RankFailed: another rank has told that it failed.
    """
    now = time.monotonic()
    give_up = None if timeout_s is None else now + timeout_s
    next_look, nap_s = now + _LOOK_S, _FIRST_NAP_S
    while _movers and not is_ready():
        if step():
            nap_s = _FIRST_NAP_S
            continue
        now = time.monotonic()
        if give_up is not None and now > give_up:
            return
        if now > next_look:
            next_look = now + _LOOK_S
            failure = posted_failure()
            if failure is not None:
                raise failure
        time.sleep(nap_s)
        nap_s = min(nap_s * 1.5, _LAST_NAP_S)
