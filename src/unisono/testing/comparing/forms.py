"""The forms of one program, aligned: the same tensor on one rank and on several, and its distance.

Replicas are compared one by one; blocks, rows of a batch and shards of all ranks are joined.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

from unisono.testing.comparing.probe import Key, Note, Recording, TensorMoments

ULPS = 256.0
"""Largest distance that another order of sums explains, in units in the last place, per step."""
_CANCELLING = ("gradient", "state")
"""Kinds of tensors that may be nothing but rounding, as the gradient of a bias before BatchNorm."""
_NOISE = 2.0**10
"""Values of at most this number of units in the last place of the largest ones count as zero."""


@dataclass(frozen=True)
class Difference:
    """How far one tensor is from what it is in the first form."""

    key: Key
    distance: float
    """Relative to the size of the tensor; infinite where sizes do not fit."""
    ulps: float
    """The same in units in the last place."""
    bound: float
    """Number of them that another order of sums explains."""

    @property
    def is_real(self) -> bool:
        """Whether rounding does not explain it."""
        return self.ulps > self.bound


class ProgramForm:
    """One program on some ranks.

    Args:
        recordings: of all ranks, in order.
    """

    def __init__(self, recordings: Sequence[Recording]) -> None:
        self.recordings = list(recordings)
        self.size = len(self.recordings)
        self.steps = min(recording.steps for recording in self.recordings)
        self._notes = [{note.key: note for note in r.notes} for r in self.recordings]

    def order(self) -> list[Key]:
        """Return all tensors of the first rank, in the order of events."""
        return list(self._notes[0])

    def of(self, key: Key) -> list[Note]:
        """Return what all ranks have noted of a tensor; fewer than ranks if some have not."""
        return [notes[key] for notes in self._notes if key in notes]

    def rows(self, step: int) -> Counter[int] | None:
        """Return the rows of all batches of a step, over all ranks; None where not known."""
        notes = [note for notes in self._batches(step) for note in notes]
        if any(note.rows is None for note in notes):
            return None
        return Counter(row for note in notes for row in note.rows or ())

    def batch_sizes(self, step: int) -> list[int]:
        """Return how many rows each rank has in a step."""
        return [sum(len(note.rows or ()) for note in notes) for notes in self._batches(step)]

    def _batches(self, step: int) -> list[list[Note]]:
        """Return the first inputs of each rank in a step."""
        return [
            [note for key, note in notes.items() if key[:3] == (step, "batch", "input 0")]
            for notes in self._notes
        ]


def differences(base: ProgramForm, other: ProgramForm) -> Iterator[Difference]:
    """Yield how far each tensor of a form is from the first form, in the order of events."""
    largest: dict[tuple[int, str], float] = {}
    for key in base.order():
        if key.kind in _CANCELLING:
            here = max(note.moments.largest for note in base.of(key))
            largest[key.step, key.kind] = max(here, largest.get((key.step, key.kind), 0.0))
    for key in base.order():
        theirs = other.of(key)
        if theirs and key.step < other.steps:
            scale = largest.get((key.step, key.kind), 0.0)
            yield difference(key, base.of(key), theirs, other.size, scale)


def difference(
    key: Key, ours: Sequence[Note], theirs: Sequence[Note], size: int, scale: float = 0.0
) -> Difference:
    """Return how far a tensor is from what it is in the first form.

    Args:
        key: which tensor.
        ours: what ranks of the first form have noted of it.
        theirs: what ranks of the other form have.
        size: number of ranks there.
        scale: largest value of all tensors of its kind; what is far below is rounding.
    """
    eps = max(note.eps for note in (*ours, *theirs)) or 2.0**-52
    floor = scale * eps * _NOISE
    base = _joined(ours)
    is_shard = ours[0].is_shard or theirs[0].is_shard
    if key.kind == "loss" and size > 1 and not is_shard:
        mean = sum(note.moments.total for note in theirs) / len(theirs)
        distance = abs(mean - base.total) / (max(abs(base.total), abs(mean)) or 1.0)
    elif not is_shard and all(note.moments.elements == base.elements for note in theirs):
        distance = max(apart(base, note.moments, floor) for note in theirs)
    else:
        distance = _of_blocks(ours, theirs, floor)
    return Difference(key, distance, distance / eps, ULPS * (1 + key.step))


def _of_blocks(ours: Sequence[Note], theirs: Sequence[Note], floor: float) -> float:
    """Return the distance of tensors that lie on the ranks in parts."""
    a, b = _joined(ours), _joined(theirs)
    if len({note.width for note in (*ours, *theirs)}) > 1:  # cut inside of rows
        a, b = a._replace(projected=0.0), b._replace(projected=0.0)
    return apart(a, b, floor)


def _joined(notes: Sequence[Note]) -> TensorMoments:
    return reduce(TensorMoments.joined, (note.moments for note in notes))


def apart(a: TensorMoments, b: TensorMoments, floor: float = 0.0) -> float:
    """Return the distance of two tensors, relative to their size, as far as moments tell.

    Values below `floor` count as zero.

    >>> one = TensorMoments(4, 10, 30, 7, 4)
    >>> apart(one, one), round(apart(one, TensorMoments(4, 11, 30, 7, 4)), 3)
    (0.0, 0.091)
    """
    if a.elements != b.elements:
        return math.inf
    numbers = (*a, *b)
    if any(math.isnan(x) or math.isinf(x) for x in numbers):
        return 0.0 if repr(a) == repr(b) else math.inf
    squares = max(a.squares, b.squares)
    if max(a.largest, b.largest) <= floor:
        return 0.0
    parts = [abs(a.total - b.total) / math.sqrt(max(a.elements, 1.0) * squares)]
    parts.append(abs(a.squares - b.squares) / squares / 2)
    parts.append(abs(a.projected - b.projected) / max(a.projected, b.projected, squares) / 2)
    parts.append(abs(a.largest - b.largest) / max(a.largest, b.largest))
    return max(parts)
