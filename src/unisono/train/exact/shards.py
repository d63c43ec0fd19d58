"""The arithmetic of a step: a batch is a fixed number of shards, added up in one fixed tree.

Nothing here depends on how many members there are, so neither do the bits of what comes out.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from unisono.accelerator import repeatable
from unisono.errors import UnisonoError
from unisono.launch.elastic.coordinator import LINE, MOST, Run, split
from unisono.train.generators import random_states, set_random_states

_ALIGN = 64
"""Bytes; sums of anything less aligned may take another way through the machine."""
NOTE_BYTES = 8192
"""Room for what a shard says besides its gradient."""
T = TypeVar("T")


def half(count: int) -> int:
    """Return where a tree over `count` shards is cut: the largest power of two below.

    >>> [half(n) for n in (2, 3, 6, 8)]
    [1, 2, 4, 4]
    """
    return 1 << (count - 1).bit_length() - 1


def nodes_in(run: Run, first: int, count: int) -> list[tuple[int, int]]:
    """Return the largest nodes, as first shard and number of shards, of a tree that lie in `run`.

    >>> nodes_in((1, 4), 0, 8)
    [(1, 1), (2, 2)]
    """
    begin, end = run
    if begin <= first and first + count <= end:
        return [(first, count)]
    if count == 1 or end <= first or begin >= first + count:
        return []
    cut = half(count)
    return nodes_in(run, first, cut) + nodes_in(run, first + cut, count - cut)


def tree_sum(
    first: int, count: int, sum_of: Callable[[int, int], T | None], add: Callable[[T, T], T]
) -> T:
    """Add up the nodes whose sums exist, in the order of the tree."""
    value = sum_of(first, count)
    if value is not None:
        return value
    cut = half(count)
    lower = tree_sum(first, cut, sum_of, add)
    return add(lower, tree_sum(first + cut, count - cut, sum_of, add))


@contextmanager
def undisturbed(threads: int, device: torch.device) -> Iterator[None]:
    """Compute with this number of threads inside; afterwards they and all generators are as before.

    An accelerator is the current one inside, and uses only kernels that give the same bits again.
    """
    with repeatable(device):
        states, before = random_states(), torch.get_num_threads()
        if before != threads:
            torch.set_num_threads(threads)
        try:
            yield
        finally:
            if before != threads:
                torch.set_num_threads(before)
            set_random_states(states)


@dataclass(frozen=True)
class Section:
    """The elements of one dtype in a vector."""

    dtype: torch.dtype
    begin: int
    """First byte."""
    numel: int

    @property
    def is_sum(self) -> bool:
        """Whether shards are added up; integers must be equal in all of them."""
        return self.dtype.is_floating_point or self.dtype.is_complex

    def of(self, vector: Tensor, piece: int = 0, cut: int = 1) -> Tensor:
        """Return one of `cut` pieces of this section of a vector of bytes."""
        begin, end = self.bounds(piece, cut)
        return vector[begin:end].view(self.dtype)

    def bounds(self, piece: int, cut: int) -> tuple[int, int]:
        """Return the bytes of a piece, from and to."""
        blocks = -(-self.numel // _ALIGN)
        first, end = (min(self.numel, place * _ALIGN) for place in split(blocks, cut)[piece])
        return self.begin + first * self.dtype.itemsize, self.begin + end * self.dtype.itemsize


class VectorLayout:
    """Where everything that shards add up lies: gradients, changes of buffers, notes, the result.

    Args:
        parameters: the tensors whose gradients are added up.
        buffers: the model's buffers.
        shards: how many.
    """

    def __init__(
        self, parameters: Sequence[Tensor], buffers: Sequence[Tensor], shards: int
    ) -> None:
        self.shards = shards
        self.parameters, self.buffers = parameters, buffers
        self.sections: list[Section] = []
        self._places: list[tuple[int, int]] = []
        everything = [*parameters, *buffers]
        dtypes = list(dict.fromkeys(tensor.dtype for tensor in everything))
        at, counts = 0, dict.fromkeys(dtypes, 0)
        for tensor in everything:
            self._places.append((dtypes.index(tensor.dtype), counts[tensor.dtype]))
            counts[tensor.dtype] += tensor.numel()
        for dtype in dtypes:
            self.sections.append(Section(dtype, at, counts[dtype]))
            at += -(-counts[dtype] * dtype.itemsize // _ALIGN) * _ALIGN
        self.bytes = at
        """Of one vector."""
        self.note_bytes = NOTE_BYTES + _ALIGN * (len(parameters) // 200)
        self._rows = MOST * LINE
        self.result = self._rows + shards * at
        """First byte of the result on the board."""
        self._notes = self.result + at
        self.board_bytes = self._notes + 2 * shards * self.note_bytes

    def row(self, shard: int) -> int:
        """Return the first byte of the sum that begins with a shard."""
        return self._rows + shard * self.bytes

    def notes(self, step: int) -> int:
        """Return the first byte of the notes of a step.

        Two steps have theirs apart: a member may write to those of the next step while another one
        still reads.
        """
        return self._notes + step % 2 * self.shards * self.note_bytes

    def views(self, vector: Tensor) -> list[Tensor]:
        """Return the parts of a vector that belong to parameters and buffers, in their order."""
        flat = [section.of(vector) for section in self.sections]
        everything = [*self.parameters, *self.buffers]
        return [
            flat[number][at : at + tensor.numel()].view(tensor.shape)
            for (number, at), tensor in zip(self._places, everything, strict=True)
        ]

    def add(self, lower: Tensor, upper: Tensor) -> Tensor:
        """Add the second vector to the first."""
        for section in self.sections:
            _add(section, section.of(lower), section.of(upper), section.of(lower))
        return lower

    def reduce(
        self,
        runs: Iterable[Run],
        piece: int,
        cut: int,
        view: Callable[[int, int], Tensor],
    ) -> None:
        """Add up one piece of the vectors of all shards, as a part of the result.

        Args:
            runs: runs of shards whose nodes lie on the board.
            piece: which piece.
            cut: of how many.
            view: gives bytes of the board, from and to.
        """
        nodes = {node for run in runs for node in nodes_in(run, 0, self.shards)}
        for section in self.sections:
            begin, end = section.bounds(piece, cut)
            if end == begin:
                continue

            def sum_of(
                first: int, count: int, begin: int = begin, end: int = end, s: Section = section
            ) -> Tensor | None:
                if (first, count) not in nodes:
                    return None
                at = self.row(first)
                return view(at + begin, at + end).view(s.dtype)

            def add(lower: Tensor, upper: Tensor, s: Section = section) -> Tensor:
                return _add(s, lower, upper, None)

            total = view(self.result + begin, self.result + end).view(section.dtype)
            total.copy_(tree_sum(0, self.shards, sum_of, add))

    def digest(self, names: Sequence[str]) -> str:
        """Return a short word for names, shapes and dtypes."""
        everything = [*self.parameters, *self.buffers]
        parts = [(n, tuple(t.shape), str(t.dtype)) for n, t in zip(names, everything, strict=True)]
        return hashlib.blake2b(repr(parts).encode(), digest_size=6).hexdigest()


def _add(section: Section, lower: Tensor, upper: Tensor, out: Tensor | None) -> Tensor:
    if section.is_sum:
        return torch.add(lower, upper, out=out)
    if not torch.equal(lower, upper):
        raise UnisonoError.because(
            "integer buffers after a step of an elastic training",
            f"shards of one batch have left them with other values ({section.dtype})",
            hint="count batches, not what is in them; or a float buffer, which is averaged",
        )
    return lower if out is None else out.copy_(lower)


def fresh(batch: Any) -> Any:
    """Return a batch with its tensors in aligned memory of their own."""
    if isinstance(batch, Tensor):
        is_aligned = batch.data_ptr() % _ALIGN == 0 and batch.storage_offset() == 0
        return batch if is_aligned else batch.clone()
    if isinstance(batch, dict):  # of whatever kind: a defaultdict is made otherwise
        made = copy.copy(batch)
        made.update((key, fresh(value)) for key, value in batch.items())
        return made
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(fresh, batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(map(fresh, batch))
    return batch
