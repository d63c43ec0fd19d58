"""Notes: a few integers that each rank leaves for all others, and reads from them when it likes.

Each rank has four places for them in its control block, used in turn, and a note carries its
number. A rank has at most two notes open, which it has not read from all others. So whoever posts
note n has read all notes up to n - 2 of the others; and they, having posted that one, those up to
n - 4 of this rank: the place of note n is free. Stores must be seen in order (x86).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from unisono.comm.transports.shm.control import Control
from unisono.comm.transports.shm.layout import NOTE, NOTE_INTS, NOTE_PLACES, NOTE_WORDS
from unisono.comm.transports.shm.libc import sched_yield
from unisono.comm.transports.shm.waiting import cores
from unisono.comm.transports.shm.watch import Watch
from unisono.errors import CollectiveMismatch

_MOST_OPEN = NOTE_PLACES // 2
_SPINS = 50
_YIELD_S = 2e-3
_FIRST_NAP_S = 20e-6
_LAST_NAP_S = 1e-3


class Note:
    """The notes of all ranks under one number, as one rank sees them.

    Attributes:
        rows: the integers of each rank, once read.
    """

    __slots__ = ("_notes", "number", "rows")

    def __init__(self, notes: Notes, number: int) -> None:
        self._notes = notes
        self.number = number
        self.rows: list[tuple[int, ...]] | None = None

    def wait(self, timeout_s: float) -> None:
        """See `Ticket`."""
        if self.rows is None:
            self._notes.read(self, timeout_s)

    def done(self) -> bool:
        """See `Ticket`."""
        return self.rows is not None or not self._notes.missing(self.number)


class Notes:
    """The notes of one rank of a segment.

    Args:
        control: control blocks of the segment.
        watch: judge of the peers.
        idle: called now and then during long waits.
    """

    def __init__(self, control: Control, watch: Watch, idle: Callable[[], object]) -> None:
        self._words = control.words
        self._watch = watch
        self._idle = idle
        self._rank = control.rank
        self._spins = _SPINS if control.size <= cores() else 0
        self._places = [
            [
                control.layout.control_word(rank, NOTE) + place * NOTE_WORDS
                for rank in range(control.size)
            ]
            for place in range(NOTE_PLACES)
        ]
        self._number = 0
        self._open: deque[Note] = deque()

    def post(self, values: Sequence[int], timeout_s: float) -> Note:
        """Leave up to `NOTE_INTS` integers for the others; waits only where two notes are open."""
        if len(values) > NOTE_INTS:
            raise ValueError(f"{len(values)} integers, but a note has {NOTE_INTS}")
        if len(self._open) == _MOST_OPEN:
            self._open[0].wait(timeout_s)
        self._number = number = self._number + 1
        place = self._places[number % NOTE_PLACES][self._rank]
        words = self._words
        words[place + 1] = len(values)
        for offset, value in enumerate(values, place + 2):
            words[offset] = value
        words[place] = number  # last: whoever sees it sees the rest
        note = Note(self, number)
        self._open.append(note)
        return note

    def read(self, note: Note, timeout_s: float) -> None:
        """Wait for the notes of all ranks under the number of `note`, after older ones."""
        while self._open and note.rows is None:
            first = self._open[0]
            if self.missing(first.number):
                self._wait(first.number, timeout_s)
            first.rows = self._rows(first.number)
            self._open.popleft()

    def missing(self, number: int) -> list[int]:
        """Return the ranks that have not posted so many notes."""
        words = self._words
        return [
            rank
            for rank, place in enumerate(self._places[number % NOTE_PLACES])
            if words[place] < number
        ]

    def _rows(self, number: int) -> list[tuple[int, ...]]:
        words = self._words
        rows = [
            tuple(words[place + 2 : place + 2 + words[place + 1]])
            for place in self._places[number % NOTE_PLACES]
        ]
        if len({len(row) for row in rows}) > 1:
            counts = dict(zip(self._watch.ranks, map(len, rows), strict=True))
            calls = {rank: f"post_ints of {count} integers" for rank, count in counts.items()}
            lines = [f"  rank {rank}: {call}" for rank, call in calls.items()]
            raise CollectiveMismatch(
                "\n".join(["ranks of one group post different numbers of integers", *lines]), calls
            )
        return rows

    def _wait(self, number: int, timeout_s: float) -> None:
        for _ in range(self._spins):
            if not self.missing(number):
                return
        give_up = time.monotonic() + _YIELD_S
        while self.missing(number):
            sched_yield()
            if time.monotonic() > give_up:
                self._sleep(number, timeout_s)

    def _sleep(self, number: int, timeout_s: float) -> None:
        vigil = self._watch.begin(timeout_s)
        nap_s = _FIRST_NAP_S
        while self.missing(number):
            time.sleep(nap_s)
            nap_s = min(1.5 * nap_s, _LAST_NAP_S)
            self._idle()
            vigil.look(lambda: self.missing(number))
