"""The end of groups, and of a process that has some: communicators are freed before MPI ends.

A rank that leaves a group says so to the others; when all have, the communicator is freed. A rank
that ends by an exception tells the others before MPI makes it wait for them, and if they do not
end either, it ends the whole job.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
import weakref
from typing import TYPE_CHECKING, Any

from unisono.comm.transports.mpi.news import News

if TYPE_CHECKING:
    from unisono.comm.transports.mpi.engine import MpiEngine

GRACE_S = 10.0
"""Time that other ranks have to end after an exception on this one, before the job is aborted."""
PATIENCE_S = 60.0
"""Time to wait for other ranks when all is well; MPI itself waits after that."""
_FORWARD_S = 0.3
"""Time for mpiexec to pass on what was printed; an abort throws away the rest."""

_engines: list[weakref.ref[MpiEngine]] = []
_departures: list[Departure] = []
_watching_pid: int | None = None


class Departure:
    """A group this rank has left, until all others have, too.

    Args:
        mpi: the module `mpi4py.MPI`.
        news: what its ranks tell each other, over the group's communicator.
        is_broken: whether something went wrong in it.
        is_world: whether it was the group of all ranks.
    """

    def __init__(self, mpi: Any, news: News, *, is_broken: bool, is_world: bool) -> None:
        self.is_broken = is_broken
        self.is_world = is_world
        self.mpi = mpi
        self._news = news

    def is_over(self) -> bool:
        """Whether all ranks have left; then the communicator is freed."""
        if self.mpi.Is_finalized():
            return True
        try:
            if not self._news.has_everybody_left():
                return False
            if not self.is_broken:  # else transfers may still be open
                self._news.free()
        except self.mpi.Exception:
            return self.is_broken
        return True


def watch_over(engine: MpiEngine) -> None:
    """Close `engine` when the process ends, if nobody has done so before."""
    global _watching_pid
    if _watching_pid != os.getpid():
        _watching_pid = os.getpid()
        atexit.register(_end)
    _engines[:] = [ref for ref in _engines if ref() is not None]
    _engines.append(weakref.ref(engine))


def living() -> list[MpiEngine]:
    """Return the engines of this process, oldest first."""
    return [engine for ref in _engines if (engine := ref()) is not None]


def depart(departure: Departure) -> None:
    """Remember a group this rank has left, and free those that everybody has left."""
    _departures.append(departure)
    sweep()


def sweep() -> bool:
    """Free the communicators of groups that everybody has left; return whether all are."""
    _departures[:] = [departure for departure in _departures if not departure.is_over()]
    return not _departures


def count() -> int:
    """Return how many communicators this process has not given back yet."""
    sweep()
    return len(_departures) + sum(engine.cause is None for engine in living())


def _end() -> None:
    """Leave all groups before MPI is finalized."""
    if os.getpid() != _watching_pid:
        return
    error = getattr(sys, "last_value", None)
    for engine in living():
        if error is not None:
            engine.fail(error)
            engine.cancel("this rank ends with an exception")
        engine.close()
    give_up = time.monotonic() + (PATIENCE_S if error is None else GRACE_S)
    while not sweep() and time.monotonic() < give_up:
        time.sleep(1e-3)
    worlds = [departure for departure in _departures if departure.is_world]
    if error is not None and worlds:
        print(
            f"unisono: some ranks did not end within {GRACE_S:g} s of an exception on this one; "
            "the MPI job is aborted",
            file=sys.stderr,
        )
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(_FORWARD_S)
        worlds[0].mpi.COMM_WORLD.Abort(1)
