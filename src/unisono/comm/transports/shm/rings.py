"""A one-way channel between two ranks: a few cells in shared memory, filled and emptied in turn.

Each cell carries a fragment of a message with the message's tag, length and dtype. Neither side
ever blocks here: `can_write` and `can_read` tell whether there is something to do.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from unisono.comm.transports.shm.control import Control
from unisono.comm.transports.shm.layout import (
    CELL_HEADER_BYTES,
    CELLS,
    DOORBELL,
    DOORBELL_WANTED,
    RING_FILLED,
    RING_FREE,
    RING_HEADER_BYTES,
    RING_READ,
    RING_WRITTEN,
    WORD,
)
from unisono.comm.transports.shm.libc import (
    futex_wake,
    has_futex,
    memmove,
    populate,
    sem_post,
    sem_trywait,
)
from unisono.errors import UnisonoError

_HEADER = struct.Struct("5q")


@dataclass(frozen=True, slots=True)
class Fragment:
    """What a cell holds: `length` bytes from `offset` on, of a message of `nbytes`."""

    tag: int
    nbytes: int
    offset: int
    length: int
    dtype: int
    """Number of the message's dtype, the same at both ends."""


class _Ring:
    """What both ends of a ring share."""

    def __init__(self, control: Control, src: int, dst: int, *, semaphores: bool) -> None:
        layout = control.layout
        self._control = control
        self._offset = layout.ring(src, dst)
        self._address = control.address + self._offset
        self._semaphores = semaphores
        self._count = 0
        self._claimed = False
        self._written = (self._offset + RING_WRITTEN) // WORD
        self._read = (self._offset + RING_READ) // WORD
        self.cell_bytes = layout.cell_bytes
        self._stride = CELL_HEADER_BYTES + layout.cell_bytes
        other = dst if control.rank == src else src
        self._bell = layout.control_word(other, DOORBELL)
        self._bell_wanted = layout.control_word(other, DOORBELL_WANTED)
        self._bell_address = control.word_address(other, DOORBELL)

    def _cell(self) -> int:
        """Offset of the cell in turn, from the start of the ring."""
        return RING_HEADER_BYTES + self._count % CELLS * self._stride

    def _claim(self, semaphore: int) -> bool:
        if not self._claimed:
            self._claimed = sem_trywait(self._address + semaphore) == 0
        return self._claimed

    def _ring_the_bell(self) -> None:
        """Let the other end look. Any new value will do; two ranks never write the same one."""
        words = self._control.words
        words[self._bell] = self._count * self._control.size + self._control.rank + 1
        if words[self._bell_wanted]:
            words[self._bell_wanted] = 0
            if has_futex():
                futex_wake(self._bell_address)


class Writer(_Ring):
    """The sending end."""

    def __init__(self, control: Control, dst: int, *, semaphores: bool) -> None:
        super().__init__(control, control.rank, dst, semaphores=semaphores)
        size = control.layout.ring_bytes
        try:
            populate(self._address, size)
        except OSError as error:
            raise UnisonoError.because(
                f"messages from rank {control.rank} to rank {dst} of the group",
                f"no room for a ring of {size} bytes of shared memory ({error.strerror})",
                None,
                "a larger --shm-size or memory limit",
            ) from error

    def can_write(self) -> bool:
        """Whether a cell is free."""
        if self._semaphores:
            return self._claim(RING_FREE)
        return self._count - self._control.words[self._read] < CELLS

    def write(self, fragment: Fragment, pointer: int) -> None:
        """Copy a fragment from `pointer` into the free cell and publish it."""
        cell = self._cell()
        _HEADER.pack_into(
            self._control.bytes,
            self._offset + cell,
            fragment.tag,
            fragment.nbytes,
            fragment.offset,
            fragment.length,
            fragment.dtype,
        )
        memmove(self._address + cell + CELL_HEADER_BYTES, pointer, fragment.length)
        self._count += 1
        self._claimed = False
        if self._semaphores:
            sem_post(self._address + RING_FILLED)
        else:
            self._control.words[self._written] = self._count
        self._ring_the_bell()


class Reader(_Ring):
    """The receiving end."""

    def __init__(self, control: Control, src: int, *, semaphores: bool) -> None:
        super().__init__(control, src, control.rank, semaphores=semaphores)
        populate(self._address, RING_HEADER_BYTES)

    def can_read(self) -> bool:
        """Whether a fragment is there."""
        if self._semaphores:
            return self._claim(RING_FILLED)
        return self._control.words[self._written] > self._count

    def peek(self) -> Fragment:
        """Return what the next fragment is."""
        return Fragment(*_HEADER.unpack_from(self._control.bytes, self._offset + self._cell()))

    def take(self, length: int, pointer: int | None) -> None:
        """Copy the next fragment to `pointer` (None drops it) and free its cell."""
        if pointer is not None:
            memmove(pointer, self._address + self._cell() + CELL_HEADER_BYTES, length)
        self._count += 1
        self._claimed = False
        if self._semaphores:
            sem_post(self._address + RING_FREE)
        else:
            self._control.words[self._read] = self._count
        self._ring_the_bell()
