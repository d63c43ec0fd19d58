"""Where things lie in the segment of a group: pure arithmetic, the same on all ranks.

A first page of constants, one control block a rank, headers and size tables of two turns,
semaphores, two slots a rank, and one ring for each ordered pair of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from unisono.comm.transports.shm.libc import SEM_BYTES
from unisono.errors import UnisonoError

PAGE = 4096
WORD = 8
MAGIC = 0x756E69736F6E6F  # "unisono"
VERSION = 2

CONTROL_BYTES = 512
COUNTER, WANTED, DOORBELL, DOORBELL_WANTED, STATE, CULPRIT = 0, 1, 8, 9, 16, 17
"""Words of a control block. Words polled by others have a cache line of their own."""

NOTE, NOTE_PLACES, NOTE_INTS = 24, 4, 6
NOTE_WORDS = 2 + NOTE_INTS
"""Places for notes in a control block: number, count, integers."""

JOINING, ALIVE, FAILED, CLOSED, GAVE_UP = 0, 1, 2, 3, 4
"""Values of the STATE word. A rank gives up when its deadline passes."""

TEXT_BYTES = 2048
"""Room for the words of a rank that failed."""

HEADER_WORDS = 8
"""Words of the header a rank writes at the start of a collective."""

CELLS = 4
"""Cells of a ring."""
CELL_HEADER_BYTES = 64

SHIFT = 1024
"""Data lies this far from the start of a page. Large tensors lie 64 bytes from it, and a copy whose
target is 64 bytes further in its page than its source takes twice the time."""

RING_HEADER_BYTES = PAGE + SHIFT
RING_WRITTEN, RING_READ, RING_FILLED, RING_FREE = 0, 64, 128, 192
"""Bytes of a ring's header: two counters and two semaphores."""

MIN_SLOT_BYTES = 4096
DEFAULT_SLOT_KB = 1024
_MB = 1 << 20


def _up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


@dataclass(frozen=True)
class Layout:
    """Offsets in bytes for `size` ranks and slots of `slot_bytes`."""

    size: int
    slot_bytes: int

    @property
    def control(self) -> int:
        """First control block."""
        return PAGE

    @property
    def texts(self) -> int:
        """Words of failed ranks, one field a rank."""
        return self.control + self.size * CONTROL_BYTES

    @property
    def headers(self) -> int:
        """Headers `[2, size, HEADER_WORDS]`."""
        return _up(self.texts + self.size * TEXT_BYTES, PAGE)

    @property
    def tables(self) -> int:
        """Size tables `[2, size, 2 * size]`: what each rank sends and what it expects."""
        return self.headers + 2 * self.size * HEADER_WORDS * WORD

    @property
    def semaphores(self) -> int:
        """Semaphores `[size, size]`, from a rank to a rank."""
        return _up(self.tables + 2 * self.size * 2 * self.size * WORD, PAGE)

    @property
    def slots(self) -> int:
        """Slots `[2, size]`."""
        return _up(self.semaphores + self.size * self.size * SEM_BYTES, PAGE) + SHIFT

    @property
    def rings(self) -> int:
        """Rings, `size - 1` of each rank."""
        return _up(self.slots + 2 * self.size * self.slot_bytes, PAGE)

    @property
    def total(self) -> int:
        """Size of the segment."""
        return self.rings + self.size * (self.size - 1) * self.ring_bytes

    @property
    def cell_bytes(self) -> int:
        """Payload of one cell of a ring; smaller where there are many rings."""
        return 65536 if self.size <= 32 else 8192

    @property
    def ring_bytes(self) -> int:
        """One ring with its header."""
        return _up(RING_HEADER_BYTES + CELLS * (CELL_HEADER_BYTES + self.cell_bytes), PAGE)

    def control_word(self, rank: int, word: int) -> int:
        """Index of a word of a control block, counted in words from the start of the segment."""
        return (self.control + rank * CONTROL_BYTES) // WORD + word

    def slot(self, turn: int, rank: int) -> int:
        """Offset of the slot of `rank` in turn 0 or 1."""
        return self.slots + (turn * self.size + rank) * self.slot_bytes

    def ring(self, src: int, dst: int) -> int:
        """Offset of the ring for messages from `src` to `dst`."""
        place = src * (self.size - 1) + (dst if dst < src else dst - 1)
        return self.rings + place * self.ring_bytes

    def semaphore(self, src: int, dst: int) -> int:
        """Offset of the semaphore that `src` posts and `dst` waits for."""
        return self.semaphores + (src * self.size + dst) * SEM_BYTES


def fitting_layout(size: int, slot_kb: int, max_mb: float | None) -> Layout:
    """Return the layout for `size` ranks with slots of `slot_kb`, made smaller to fit `max_mb`.

    >>> fitting_layout(2, 1024, None).slot_bytes
    1048576
    >>> fitting_layout(4, 1024, 4).slot_bytes
    520192
    """
    if slot_kb * 1024 < MIN_SLOT_BYTES:
        raise UnisonoError.because(
            f"UNISONO_SHM_SLOT_KB={slot_kb}",
            f"slots are at least {MIN_SLOT_BYTES // 1024} KB",
            None,
            f"UNISONO_SHM_SLOT_KB={DEFAULT_SLOT_KB}",
        )
    slot_bytes = _up(slot_kb * 1024, PAGE)
    fixed = Layout(size, 0).rings
    if max_mb is not None:
        room = int((max_mb * _MB - fixed) / (2 * size)) // PAGE * PAGE
        if room < MIN_SLOT_BYTES:
            raise UnisonoError.because(
                f"UNISONO_SHM_MAX_MB={max_mb:g} for a group of {size} ranks",
                "less than the smallest segment",
                f"{fixed / _MB:.2f} MB + 2 * {size} slots * {MIN_SLOT_BYTES // 1024} KB = "
                f"{(fixed + 2 * size * MIN_SLOT_BYTES) / _MB:.2f} MB",
                "a larger UNISONO_SHM_MAX_MB",
            )
        slot_bytes = min(slot_bytes, room)
    return Layout(size, slot_bytes)
