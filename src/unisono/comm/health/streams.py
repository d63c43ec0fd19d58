"""Deadlines of what runs on streams: the watchdog looks after the transfers that are under way.

The host does not wait for such a transfer, so no wait of it can run out. The thread of the watchdog
polls whether the oldest transfer of each group is complete. One that has a dead, failed or missing
peer, or whose deadline has passed, ends its group: the error names the rank and its line, is raised
in the main thread where it stands, and by every later call; then the backend is aborted. What the
aborted transfers leave in memory is not seen by the program.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from unisono.comm import call as calls
from unisono.comm.call import Call
from unisono.comm.health import failures, mark_as_news, watchdog
from unisono.comm.health.deadlock import obstacle_to
from unisono.comm.health.watchdog import Watchdog
from unisono.errors import CollectiveMismatch, UnisonoError

if TYPE_CHECKING:
    from unisono.comm.engines.stream import StreamTicket

PATIENCE_S = 0.5
"""A transfer of this age is compared with what other ranks have said, this often."""
_MOST_QUEUED = 64
"""Above this number the caller removes completed transfers itself."""
_NAP_S = 1e-3
_GRACE_S = 10.0


class Lane:
    """The transfers of one group that are under way, oldest first.

    Args:
        key: name of the group, unique in the world.
        ranks: world ranks of the group.
        abort: ends what the backend has under way; may block.
        report: called with the error that has ended the group.
    """

    def __init__(
        self,
        key: str,
        ranks: Sequence[int],
        abort: Callable[[], object],
        report: Callable[[UnisonoError], object],
    ) -> None:
        self.cause: UnisonoError | None = None
        """Why the group cannot be used any more."""
        self.key = key
        self.ranks = tuple(ranks)
        self._abort = abort
        self._report = report
        self._transfers: deque[StreamTicket] = deque()
        self._lock = threading.Lock()
        self._next_question = 0.0
        watchdog.lanes.add(self)

    def add(self, transfer: StreamTicket) -> None:
        """Look after a transfer until it is complete."""
        self._transfers.append(transfer)
        if len(self._transfers) > _MOST_QUEUED:
            self._remove_complete()
        elif len(self._transfers) == 1 and (dog := watchdog.serving(self.key)) is not None:
            dog.wake()

    def settle(self) -> None:
        """Wait until the device has carried out all transfers, or the group was given up."""
        while True:
            self._remove_complete()
            with self._lock:
                last = self._transfers[-1] if self._transfers else None
            if last is None:
                return
            if time.monotonic() > last.deadline + _GRACE_S:  # and the thread has not said why
                raise failures.timed_out(last.call, self.ranks, last.timeout_s)
            time.sleep(_NAP_S)

    @property
    def is_busy(self) -> bool:
        """Whether a transfer is under way, as far as it is known."""
        return bool(self._transfers)

    def look(self) -> None:
        """Remove complete transfers; end the group if one cannot complete."""
        self._remove_complete()
        with self._lock:
            transfers = list(self._transfers)
        if not transfers:
            return
        now, oldest = time.monotonic(), transfers[0]
        error: UnisonoError | None = None
        if now - oldest.began > PATIENCE_S and now >= self._next_question:
            self._next_question = now + PATIENCE_S
            error = self._obstacle(oldest.call)
        late = next((t for t in transfers if t.deadline < now and not t.is_complete()), None)
        if error is None and late is not None and self.cause is None:
            error = failures.timed_out(late.call, self.ranks, late.timeout_s)
        if error is not None and not (late or oldest).is_complete():
            if not isinstance(error, CollectiveMismatch) or error.returned:
                self._announce(error)  # of unlike calls all ranks learn in the same words
            self.end(error)

    def end(self, error: UnisonoError) -> None:
        """Give the group up because of `error`, unless that was done before."""
        with self._lock:
            if self.cause is not None:
                return
            is_waited_for = any(not transfer.is_complete() for transfer in self._transfers)
            self._transfers.clear()
            self._report(mark_as_news(error))
            if is_waited_for:
                _raise_in_main_thread(error)
            self.cause = error
        # In a thread of its own: a backend may wait for its device, and other groups go on.
        threading.Thread(target=self._abort_backend, name="unisono-abort", daemon=True).start()

    def _abort_backend(self) -> None:
        with contextlib.suppress(RuntimeError):  # not every backend can
            self._abort()

    def _remove_complete(self) -> None:
        with self._lock:
            while self._transfers and self._transfers[0].is_complete():
                self._transfers.popleft().call.done = True

    def _obstacle(self, call: Call) -> UnisonoError | None:
        """Return why `call` cannot complete, from what other ranks have said; asks the store."""
        dog = watchdog.of(call.key)
        if dog is None:
            return None
        try:
            self.hear(dog)  # a rank that has given up, and ended, is not the first to have ended
            if self.cause is not None:
                return None
            return obstacle_to(call) or self._dead_peer(call, dog)
        except RuntimeError:
            return None  # the store is gone

    def _dead_peer(self, call: Call, dog: Watchdog) -> UnisonoError | None:
        returned = {item.get("returned") for item in dog.news()}
        for rank in self.ranks:
            if rank == dog.rank or rank in returned or dog.condition(rank) != "dead":
                continue
            # A rank that raised an exception has posted it just before its end.
            host, doing = socket.gethostname(), f"{call.describe()} at {call.site}"
            pid = int((dog.card(rank) or [0, 0])[1])
            return dog.poll_failure() or failures.peer_died(doing, dog.rank, rank, pid, host)
        return None

    def _announce(self, error: UnisonoError) -> None:
        """Tell the other ranks of the group that this one waits no longer, and for whom."""
        dog, culprit = watchdog.of(self.key), getattr(error, "rank", None)
        if dog is not None:
            text = str(error).partition("\n")[0]
            record = {"gave_up": self.key, "rank": dog.rank, "culprit": culprit, "text": text}
            dog.publish({**record, "host": socket.gethostname()})

    def hear(self, dog: Watchdog) -> None:
        """End the group if another rank has given it up, also where nothing is under way here."""
        if self.cause is not None:
            return
        for item in dog.news():
            if item.get("gave_up") == self.key and item["rank"] != dog.rank:
                doing = calls.latest_call.describe() if calls.latest_call else ""
                teller, culprit = item["rank"], item["culprit"]
                culprit = teller if culprit is None else culprit
                words = doing, dog.rank, teller, culprit, item["host"], item["text"]
                self.end(failures.peer_gave_up(*words))
                return

    def forget(self) -> None:
        """Drop everything: after a fork, or at the end of the world."""
        self._lock = threading.Lock()
        self._transfers.clear()


def settle() -> None:
    """Wait until devices have carried out what this rank has begun; raise why they could not.

    Local. Without it a function could return although its last transfer never completed.
    """
    for lane in list(watchdog.lanes):
        lane.settle()


def _raise_in_main_thread(error: UnisonoError) -> None:
    """Have the main thread raise `error` at its next step, or when it comes back from the device.

    Nothing else reaches a program that reads a result instead of making another call.
    """

    class Arriving(Exception):
        def __new__(cls, *_: object) -> Exception:
            return error

    ident = threading.main_thread().ident
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(ident or 0), ctypes.py_object(Arriving)
    )


def forget() -> None:
    """Drop all transfers: at the end of the world, and in a process that was forked. Local."""
    for lane in list(watchdog.lanes):
        lane.forget()


os.register_at_fork(after_in_child=forget)
