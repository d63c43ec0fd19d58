"""DistDL's `backends.mpi.buffer`: memory that layers share and that grows on demand.

Layers here bring their own memory; these are for programs that use the buffers themselves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from unisono.errors import PartitionError, an


class MPIExpandableBuffer:
    """A flat array that grows, seen as arrays of any shape. All views begin at its start.

    Args:
        dtype: of the array.
        initial_capacity: number of elements to begin with.

    >>> buffer = MPIExpandableBuffer(np.float32)
    >>> buffer.get_view((2, 3)).shape, buffer.capacity
    ((2, 3), 6)
    """

    def __init__(self, dtype: Any, initial_capacity: int = 0) -> None:
        self.dtype = dtype
        self.capacity = initial_capacity
        self.raw_buffer: np.ndarray = np.empty(initial_capacity, dtype=dtype)
        self.views: dict[tuple[int, ...], np.ndarray] = {}
        """By shape; on the present array."""

    def expand(self, new_capacity: int) -> None:
        """Grow to at least this many elements; values stay, and `views` move along."""
        if new_capacity <= self.capacity:
            return
        grown = np.empty(new_capacity, dtype=self.dtype)
        grown[: self.capacity] = self.raw_buffer
        self.raw_buffer, self.capacity = grown, int(new_capacity)
        self.views = {shape: self._seen_as(shape) for shape in self.views}

    def allocate_view(self, view_shape: Iterable[int]) -> None:
        """Make room for a view."""
        self.get_view(view_shape)

    def get_view(self, view_shape: Iterable[int]) -> np.ndarray:
        """Return the first elements as an array of this shape."""
        shape = tuple(int(n) for n in view_shape)
        if shape not in self.views:
            self.expand(math.prod(shape))
            self.views[shape] = self._seen_as(shape)
        return self.views[shape]

    def _seen_as(self, shape: tuple[int, ...]) -> np.ndarray:
        return self.raw_buffer[: math.prod(shape)].reshape(shape)


class MPIBufferManager:
    """Buffers by dtype, handed out again to whoever asks.

    >>> manager = MPIBufferManager()
    >>> first = manager.request_buffers(2, np.float32)
    >>> manager.request_buffers(1, np.float32)[0] is first[0]
    True
    """

    def __init__(self) -> None:
        self.buffers_map: dict[Any, list[MPIExpandableBuffer]] = {}

    def request_buffers(
        self, n_buffers: int, dtype: Any, **kwargs: Any
    ) -> list[MPIExpandableBuffer]:
        """Return the first `n_buffers` of this dtype, making those that are missing.

        Args:
            n_buffers: how many.
            dtype: of numpy.
            kwargs: for `MPIExpandableBuffer`, where one is made.
        """
        known = self.buffers_map.setdefault(dtype, [])
        while len(known) < n_buffers:
            known.append(MPIExpandableBuffer(dtype, **kwargs))
        return known[:n_buffers]


def manager_or_new(buffer_manager: MPIBufferManager | None) -> MPIBufferManager:
    """Return the manager that a layer was given, or its own one."""
    if buffer_manager is None:
        return MPIBufferManager()
    if not isinstance(buffer_manager, MPIBufferManager):
        raise PartitionError.because(
            f"buffer_manager={buffer_manager!r}",
            an(type(buffer_manager).__name__),
            None,
            "backend.BufferManager(), or None",
        )
    return buffer_manager
