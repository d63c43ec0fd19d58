"""How ranks of a segment wait for each other: all ranks meet, again and again.

A meeting costs two stores and a few loads when everybody is there. Else a rank climbs a ladder:
read again and again, give the core away, sleep. `CounterSync` relies on the order in which x86
machines show stores to each other; `SemaphoreSync` works on every machine.
"""

from __future__ import annotations

import os
import platform
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from unisono.comm.transports.shm.control import Control
from unisono.comm.transports.shm.layout import (
    CELLS,
    COUNTER,
    RING_FILLED,
    RING_FREE,
    WANTED,
    Layout,
)
from unisono.comm.transports.shm.libc import (
    Timespec,
    futex_wait,
    futex_wake,
    has_futex,
    sched_yield,
    sem_init,
    sem_post,
    sem_trywait,
    sem_value,
    sem_wait_until,
)
from unisono.comm.transports.shm.watch import Watch

_SPINS = 200
_YIELD_S = 2e-3
_YIELD_S_BEHIND = 5e-3
"""Beside a thread that computes, giving the core away for longer beats sleeping: waking up costs
far more than the wait, and the computing thread gets the core meanwhile."""
_FIRST_NAP_S = 20e-6
_LAST_NAP_S = 1e-3
_SLICE_S = 2e-3
_STRONG_ORDER = ("x86_64", "AMD64", "i686", "x86")


def needs_semaphores() -> bool:
    """Whether plain loads and stores of this machine are too weakly ordered to meet by them."""
    return platform.machine() not in _STRONG_ORDER


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Sync(ABC):
    """Meetings of all ranks of a segment, seen from one of them.

    Everything a rank wrote before `arrive` is seen by a rank that has returned from `wait`.

    Attributes:
        timeout_s: deadline of each wait.
        behind: whether this runs beside the thread that computes; then it must not hold the GIL.
        waited_ns: time spent in waits so far.
        idle: called now and then during long waits.
    """

    def __init__(self, control: Control, watch: Watch) -> None:
        self.timeout_s = 600.0
        self.behind = False
        self.waited_ns = 0
        self.idle: Callable[[], object] | None = None
        self._watch = watch
        self._rank = control.rank
        self._size = control.size
        self._spins = _SPINS if control.size <= cores() else 0

    @abstractmethod
    def arrive(self) -> None:
        """Tell the others that this rank is at the meeting."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until all others have arrived, too."""

    def sync(self) -> None:
        """Meet: arrive and wait."""
        self.arrive()
        self.wait()


class CounterSync(Sync):
    """Meetings by one counter a rank, which only its owner writes."""

    def __init__(self, control: Control, watch: Watch) -> None:
        super().__init__(control, watch)
        self._words = control.words
        self._met = 0
        self._counters = [control.layout.control_word(r, COUNTER) for r in range(control.size)]
        self._wanted = [control.layout.control_word(r, WANTED) for r in range(control.size)]
        self._addresses = [control.word_address(r, COUNTER) for r in range(control.size)]
        self._own_counter = self._counters[self._rank]
        self._own_wanted = self._wanted[self._rank]
        self._own_address = self._addresses[self._rank]
        self._others = [r for r in range(control.size) if r != self._rank]
        self._other_counters = [(self._counters[r], r) for r in self._others]
        self._nap = Timespec()
        self._has_futex = has_futex()

    def arrive(self) -> None:
        """See `Sync`."""
        self._met = met = self._met + 1
        words = self._words
        words[self._own_counter] = met
        # A sleeper says so before it sleeps. If this load came too early to see it, the sleeper's
        # nap ends by itself.
        if words[self._own_wanted]:
            words[self._own_wanted] = 0
            if self._has_futex:
                futex_wake(self._own_address)

    def wait(self) -> None:
        """See `Sync`."""
        words, met = self._words, self._met
        for counter, rank in self._other_counters:
            if words[counter] < met:
                self._wait_for(rank)

    def _wait_for(self, rank: int) -> None:
        before = time.perf_counter_ns()
        words, counter, met = self._words, self._counters[rank], self._met
        if not self.behind:
            for _ in range(self._spins):
                if words[counter] >= met:
                    self.waited_ns += time.perf_counter_ns() - before
                    return
        patience = _YIELD_S_BEHIND if self.behind else _YIELD_S
        give_up = before + int(patience * 1e9)
        while words[counter] < met:
            sched_yield()
            if time.perf_counter_ns() > give_up:
                self._sleep_for(rank)
        self.waited_ns += time.perf_counter_ns() - before

    def _sleep_for(self, rank: int) -> None:
        words, counter, met = self._words, self._counters[rank], self._met
        vigil = self._watch.begin(self.timeout_s)
        nap_s = _FIRST_NAP_S
        while True:
            words[self._wanted[rank]] = 1
            seen = words[counter]
            if seen >= met:
                return
            if self._has_futex:
                self._nap.set(nap_s)
                futex_wait(self._addresses[rank], seen, self._nap)
            else:
                time.sleep(nap_s)
            nap_s = min(nap_s * 1.5, _LAST_NAP_S)
            if words[counter] >= met:
                return
            if self.idle is not None:
                self.idle()
            vigil.look(self._missing)

    def _missing(self) -> list[int]:
        return [r for r in self._others if self._words[self._counters[r]] < self._met]


class SemaphoreSync(Sync):
    """Meetings by one semaphore for each ordered pair of ranks, which also orders memory."""

    def __init__(self, control: Control, watch: Watch) -> None:
        super().__init__(control, watch)
        layout, base, me = control.layout, control.address, control.rank
        others = [r for r in range(control.size) if r != me]
        self._outgoing = [base + layout.semaphore(me, r) for r in others]
        self._incoming = [(r, base + layout.semaphore(r, me)) for r in others]
        self._until = Timespec()

    def arrive(self) -> None:
        """See `Sync`."""
        for address in self._outgoing:
            sem_post(address)

    def wait(self) -> None:
        """See `Sync`."""
        for place, (_, address) in enumerate(self._incoming):
            if sem_trywait(address) != 0:
                self._wait_for(place, address)

    def _wait_for(self, place: int, address: int) -> None:
        before = time.perf_counter_ns()
        patience = _YIELD_S_BEHIND if self.behind else _YIELD_S
        give_up = before + int(patience * 1e9)
        taken = False
        while not taken and time.perf_counter_ns() < give_up:
            sched_yield()
            taken = sem_trywait(address) == 0
        if not taken:
            self._sleep_for(place, address)
        self.waited_ns += time.perf_counter_ns() - before

    def _sleep_for(self, place: int, address: int) -> None:
        vigil = self._watch.begin(self.timeout_s)
        while True:
            if self.idle is not None:
                self.idle()
            self._until.set(time.time() + _SLICE_S)
            if sem_wait_until(address, self._until):
                return
            vigil.look(lambda: self._missing(place))

    def _missing(self, place: int) -> list[int]:
        return [rank for rank, address in self._incoming[place:] if sem_value(address) == 0]


def init_semaphores(address: int, layout: Layout) -> None:
    """Set up all semaphores of a new segment that starts at `address`."""
    for src in range(layout.size):
        for dst in range(layout.size):
            sem_init(address + layout.semaphore(src, dst), 1, 0)
            if src != dst:
                ring = address + layout.ring(src, dst)
                sem_init(ring + RING_FILLED, 1, 0)
                sem_init(ring + RING_FREE, 1, CELLS)
