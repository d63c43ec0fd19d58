"""The slots through which the ranks of a segment hand data to each other, and their headers.

A collective is a row of turns. In a turn a rank writes its own slot, meets the others, and reads
theirs. There are two slots a rank, used in turn: nobody writes a slot again before all have met
once more, and whoever comes to that meeting has read what it needed. With the first turn every
rank writes what it is about to do; ranks that disagree find out before any data is used.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch

from unisono.comm.headers import DTYPES
from unisono.comm.transports.rank_order import OPS, Array
from unisono.comm.transports.shm.buffers import SharedBuffers
from unisono.comm.transports.shm.control import Control
from unisono.comm.transports.shm.layout import HEADER_WORDS, WORD, Layout
from unisono.comm.transports.shm.segment import Segment
from unisono.comm.transports.shm.waiting import Sync
from unisono.errors import CollectiveMismatch

VERBS: tuple[str, ...] = (
    "barrier",
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "gather",
    "scatter",
    "all_gather_ints",
    "shared_buffer",
)
"""Collectives by the number under which they travel. Append only."""

_NUMBER = {verb: number for number, verb in enumerate(VERBS)}
_DTYPE_NUMBER = {dtype: number + 1 for number, dtype in enumerate(DTYPES)}
_NO_OP = 255
_NO_ROOT = (1 << 24) - 1
_MAX_VIEWS = 512
SMALL_BYTES = 16 * 1024
"""Up to here every rank reduces everything itself after one meeting."""


class Board:
    """Slots and headers, as one rank uses them.

    Args:
        segment: the group's segment.
        layout: its layout.
        control: its control blocks.
        sync: how to meet.
        ranks: world rank of each rank, for messages.
    """

    def __init__(
        self,
        segment: Segment,
        layout: Layout,
        control: Control,
        sync: Sync,
        ranks: Sequence[int],
    ) -> None:
        memory = memoryview(segment.memory)
        self.rank = control.rank
        self.size = layout.size
        self.ranks = tuple(ranks)
        self.slot_bytes = layout.slot_bytes
        self.sync = sync
        self.buffers = SharedBuffers()
        self.address = tuple(
            tuple(segment.address + layout.slot(k, r) for r in range(self.size)) for k in (0, 1)
        )
        """Where the slots lie: `address[turn][rank]`."""
        self.raw: tuple[tuple[Array, ...], ...] = tuple(
            tuple(
                np.frombuffer(memory, np.uint8, self.slot_bytes, layout.slot(k, r))
                for r in range(self.size)
            )
            for k in (0, 1)
        )
        """The slots as bytes: `raw[turn][rank]`."""
        self._words = control.words
        first = layout.headers // WORD
        self._headers = tuple(
            tuple(first + (k * self.size + r) * HEADER_WORDS for r in range(self.size))
            for k in (0, 1)
        )
        self._other_headers = tuple(
            tuple(h for r, h in enumerate(row) if r != self.rank) for row in self._headers
        )
        row = 2 * self.size
        table = layout.tables // WORD
        self._tables = tuple((table + k * self.size * row, row) for k in (0, 1))
        self._turn = 0
        self._views: dict[tuple[str, int, int], tuple[list[Array], list[Array]]] = {}
        self._private = np.empty(min(SMALL_BYTES, self.slot_bytes), np.uint8)
        self.private_address = self._private.ctypes.data
        """A place for small results, in memory of this rank alone."""
        self._private_views: dict[tuple[str, int], Array] = {}

    def turn(self) -> int:
        """Begin a turn; returns which slots it uses."""
        turn = self._turn
        self._turn = turn ^ 1
        return turn

    def write_sizes(self, *sizes: Sequence[int]) -> None:
        """Leave sizes for the first meeting of the collective that is about to begin.

        Args:
            sizes: what this rank sends to each, and what it expects from each.
        """
        first, row = self._tables[self._turn]
        place = first + self.rank * row
        for values in sizes:
            for value in values:
                self._words[place] = value
                place += 1

    def read_sizes(self, turn: int) -> list[list[int]]:
        """Return what each rank has left for this turn; only what was written means something."""
        first, row = self._tables[turn]
        flat = self._words[first : first + self.size * row].tolist()
        return [flat[i : i + row] for i in range(0, len(flat), row)]

    def views(
        self, turn: int, storage: np.dtype[np.generic], nbytes: int, offset: int = 0
    ) -> list[Array]:
        """Return `nbytes` from `offset` on of all ranks' slots of a turn, as elements."""
        key = (storage.char, nbytes, offset)
        both = self._views.get(key)
        if both is None:
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            both = (
                [slot[offset : offset + nbytes].view(storage) for slot in self.raw[0]],
                [slot[offset : offset + nbytes].view(storage) for slot in self.raw[1]],
            )
            self._views[key] = both
        return both[turn]

    def private(self, storage: np.dtype[np.generic], nbytes: int) -> Array:
        """Return the first `nbytes` at `private_address`, as elements."""
        key = (storage.char, nbytes)
        view = self._private_views.get(key)
        if view is None:
            if len(self._private_views) >= _MAX_VIEWS:
                self._private_views.clear()
            view = self._private_views[key] = self._private[:nbytes].view(storage)
        return view

    def meet(
        self,
        turn: int,
        code: int,
        nbytes: int,
        *,
        digest: int = 0,
        place: int = 0,
        same_size: bool = True,
    ) -> tuple[int, ...] | None:
        """Meet for the first turn of a collective, and compare what the ranks are about to do.

        Args:
            turn: from `turn`.
            code: from `code_of`; must agree.
            nbytes: bytes this rank brings; must agree if `same_size`.
            digest: hash of anything else that must agree.
            place: where in the shared buffers the data lies, 0 if it does not.
            same_size: whether all ranks bring as much.

        Returns:
            The places of all ranks, or None if no rank's data lies in a shared buffer.

        Raises:
            CollectiveMismatch: on all ranks, when the calls do not fit.
        """
        words = self._words
        own = self._headers[turn][self.rank]
        words[own] = code
        words[own + 1] = nbytes
        words[own + 2] = digest
        words[own + 3] = place
        self.sync.sync()
        shared = place
        for header in self._other_headers[turn]:
            if (
                words[header] != code
                or words[header + 2] != digest
                or (same_size and words[header + 1] != nbytes)
            ):
                raise self._mismatch(turn)
            shared |= words[header + 3]
        return tuple(words[h + 3] for h in self._headers[turn]) if shared else None

    def sizes(self, turn: int) -> list[int]:
        """Return how many bytes each rank brings to the collective that has just met."""
        return [self._words[header + 1] for header in self._headers[turn]]

    def mismatch(self, turn: int, problem: str) -> CollectiveMismatch:
        """Return the error for sizes that do not fit; all ranks must find the same."""
        return self._mismatch(turn, problem)

    def _mismatch(self, turn: int, problem: str | None = None) -> CollectiveMismatch:
        rows: list[tuple[int, int, int]] = []
        for header in self._headers[turn]:
            rows.append((self._words[header], self._words[header + 1], self._words[header + 2]))
        calls = {
            rank: f"{describe(code)} of {nbytes} bytes"
            for rank, (code, nbytes, _) in zip(self.ranks, rows, strict=True)
        }
        if problem is None:
            problem = "ranks of one group make different calls"
            if len({code for code, _, _ in rows}) == 1:
                problem = (
                    "ranks of one group bring different numbers of bytes"
                    if len({nbytes for _, nbytes, _ in rows}) > 1
                    else "ranks of one group pass different sizes, dims or shapes"
                )
        lines = [f"  rank {rank}: {call}" for rank, call in calls.items()]
        return CollectiveMismatch(
            "\n".join(
                [
                    problem,
                    *lines,
                    "  HINT: UNISONO_CHECK=1 adds the source line of every rank's call",
                ]
            ),
            calls=calls,
        )

    def release(self) -> None:
        """Drop all views of the segment."""
        self._views.clear()
        self.raw = ((), ())
        self.buffers.close()


@functools.cache
def code_of(
    verb: str, dtype: torch.dtype | None = None, op_number: int = _NO_OP, root: int | None = None
) -> int:
    """Return one word for all that must agree between ranks but sizes."""
    return (
        _NUMBER[verb]
        | (0 if dtype is None else _DTYPE_NUMBER.get(dtype, 0)) << 8
        | op_number << 16
        | (_NO_ROOT if root is None else root) << 24
    )


def describe(code: int) -> str:
    """Return a word of `code_of` as text, e.g. `all_reduce(sum, float32)`."""
    number, dtype, op, root = code & 255, code >> 8 & 255, code >> 16 & 255, code >> 24
    inner = [
        OPS[op] if op < len(OPS) else "",
        str(DTYPES[dtype - 1]).removeprefix("torch.") if 0 < dtype <= len(DTYPES) else "",
        f"root {root}" if root != _NO_ROOT else "",
    ]
    verb = VERBS[number] if number < len(VERBS) else f"call {number}"
    return f"{verb}({', '.join(word for word in inner if word)})"
