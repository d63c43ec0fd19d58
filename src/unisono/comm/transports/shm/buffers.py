"""Tensors that live in shared memory, and how a collective recognises them.

A shared buffer is one segment with a region for each rank; a rank's tensor is its own region. When
the tensors of all ranks lie at the same place of the same buffer, ranks can work on each other's
regions directly. The memory goes when the tensors have died on all ranks.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence

import numpy as np

from unisono.comm.transports.rank_order import Array
from unisono.comm.transports.shm.layout import PAGE
from unisono.comm.transports.shm.segment import Segment

_OFFSET_BITS = 40
_OFFSET_MASK = (1 << _OFFSET_BITS) - 1
_STAGGER = 1024
"""Regions start at different offsets within a page: copies between equal ones can be slow."""

FIRST = PAGE + 512
"""Where the region of rank 0 begins; see `layout.SHIFT` for why not at the start of a page."""


class SharedBuffer:
    """One buffer as this rank sees it, while its own tensor lives."""

    def __init__(self, number: int, segment: Segment, rank: int, size: int, nbytes: int) -> None:
        self.number = number
        self.nbytes = nbytes
        self.stride = region_bytes(nbytes)
        self.first = segment.address + FIRST
        self.begin = self.first + rank * self.stride
        self.end = self.begin + nbytes
        self.total = buffer_bytes(size, nbytes)
        self._memory: weakref.ref[ctypes.Array[ctypes.c_ubyte]] = weakref.ref(segment.memory)

    def is_alive(self) -> bool:
        """Whether this rank's tensor still exists."""
        return self._memory() is not None

    def region(self, rank: int, offset: int, nbytes: int) -> Array:
        """Return bytes of a rank's region; the caller holds this rank's tensor."""
        memory = self._memory()
        if memory is None:
            raise ReferenceError("the tensor of this shared buffer is gone")
        return np.frombuffer(
            memoryview(memory), np.uint8, nbytes, FIRST + rank * self.stride + offset
        )

    def address(self, rank: int, offset: int) -> int:
        """Return where `offset` of a rank's region lies in this process."""
        return self.first + rank * self.stride + offset


class SharedBuffers:
    """The shared buffers of one group on this rank."""

    def __init__(self) -> None:
        self._buffers: dict[int, SharedBuffer] = {}
        self._count = 0

    def add(self, segment: Segment, rank: int, size: int, nbytes: int) -> SharedBuffer:
        """Take a new buffer in; collective, so that all ranks give it the same number."""
        self._count += 1
        number = self._count
        self._buffers[number] = buffer = SharedBuffer(number, segment, rank, size, nbytes)
        # `buffers` is this rank's table, which the callback must not keep alive.
        weakref.finalize(segment.memory, self._buffers.pop, number, None).atexit = False
        return buffer

    def place(self, pointer: int, nbytes: int) -> int:
        """Return a word that says where in which buffer the bytes lie, 0 if in none."""
        for buffer in list(self._buffers.values()):
            if buffer.begin <= pointer and pointer + nbytes <= buffer.end:
                return (buffer.number << _OFFSET_BITS) + (pointer - buffer.begin) + 1
        return 0

    def find(self, places: Sequence[int]) -> tuple[SharedBuffer, list[int]] | None:
        """Return the buffer that all `places` lie in with their offsets; None unless it is one."""
        numbers = {(place - 1) >> _OFFSET_BITS for place in places}
        if 0 in places or len(numbers) != 1:
            return None
        buffer = self._buffers.get(numbers.pop())
        if buffer is None:
            return None
        return buffer, [(place - 1) & _OFFSET_MASK for place in places]

    @property
    def nbytes(self) -> int:
        """Shared memory held by live buffers."""
        return sum(buffer.total for buffer in list(self._buffers.values()))

    def close(self) -> None:
        """Forget all buffers; tensors that still live keep their memory."""
        self._buffers.clear()


def region_bytes(nbytes: int) -> int:
    """Return the distance between the regions of two ranks."""
    return -(-nbytes // PAGE) * PAGE + _STAGGER


def buffer_bytes(size: int, nbytes: int) -> int:
    """Return the size of the segment of a buffer with `nbytes` a rank."""
    return FIRST + size * region_bytes(nbytes)
