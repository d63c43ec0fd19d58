"""The control blocks of a segment: who the ranks are, how they fare, how far they have come."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.comm.processes import is_dead
from unisono.comm.transports.shm.layout import (
    ALIVE,
    CLOSED,
    CULPRIT,
    DOORBELL,
    FAILED,
    GAVE_UP,
    STATE,
    TEXT_BYTES,
    WORD,
    Layout,
)
from unisono.comm.transports.shm.libc import futex_wake, has_futex
from unisono.comm.transports.shm.segment import Segment


class Control:
    """Reads and writes the control blocks for one rank of the segment.

    Args:
        segment: the group's segment.
        layout: its layout.
        rank: own place in it.
        processes: process id and start time of each rank.
    """

    def __init__(
        self, segment: Segment, layout: Layout, rank: int, processes: Sequence[tuple[int, int]]
    ) -> None:
        self.layout = layout
        self.rank = rank
        self.size = layout.size
        self.is_released = False
        self._processes = tuple(processes)
        self.address = segment.address
        self.bytes = memoryview(segment.memory).cast("B")
        self.words = self.bytes.cast("q")
        """The whole segment as 8-byte words; loads and stores of one word are atomic."""

    def word(self, rank: int, word: int) -> int:
        """Read a word of a rank's control block."""
        return self.words[self.layout.control_word(rank, word)]

    def set_word(self, word: int, value: int) -> None:
        """Write a word of the own control block."""
        self.words[self.layout.control_word(self.rank, word)] = value

    def word_address(self, rank: int, word: int) -> int:
        """Return where a word of a rank's control block lies in this process."""
        return self.address + self.layout.control_word(rank, word) * WORD

    def join(self) -> None:
        """Tell the others that this process is the rank."""
        self.set_word(STATE, ALIVE)

    def fail(self, culprit: int, text: str, state: int = FAILED) -> None:
        """Tell the others that this rank has failed because of `culprit` (a world rank).

        `state` is `FAILED`, or `GAVE_UP` if it waited for the culprit in vain.
        """
        field = self.layout.texts + self.rank * TEXT_BYTES
        room = TEXT_BYTES - WORD
        raw = text.encode(errors="replace")
        # The end of a traceback says most, and the beginning of a report.
        raw = raw[:room] if state == GAVE_UP else raw[-room:]
        self.bytes[field + WORD : field + WORD + len(raw)] = raw
        self.words[field // WORD] = len(raw)
        self.set_word(CULPRIT, culprit)
        self.set_word(STATE, state)
        self.wake_all()

    def close(self) -> None:
        """Tell the others that this rank has left the group."""
        if self.word(self.rank, STATE) == ALIVE:
            self.set_word(STATE, CLOSED)
        self.wake_all()

    def wake_all(self) -> None:
        """Let everybody who sleeps for this rank look again."""
        if has_futex():
            futex_wake(self.word_address(self.rank, 0))
            for rank in range(self.size):
                futex_wake(self.word_address(rank, DOORBELL))

    def failure_text(self, rank: int) -> str:
        """Return the words a failed rank left."""
        field = self.layout.texts + rank * TEXT_BYTES
        length = self.words[field // WORD]
        return bytes(self.bytes[field + WORD : field + WORD + length]).decode(errors="replace")

    def pid(self, rank: int) -> int:
        """Return the process id of a rank."""
        return self._processes[rank][0]

    def is_dead(self, rank: int) -> bool:
        """Whether the process of a rank has ended (asks the system)."""
        return is_dead(*self._processes[rank])

    def release(self) -> None:
        """Drop the views, so that the segment can be unmapped."""
        self.is_released = True
        self.words.release()
        self.bytes.release()
