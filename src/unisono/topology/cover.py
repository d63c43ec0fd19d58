"""How a convolution is done without its window: one pass over the own block, and patches.

A convolution is linear. Where torch's own padding lines up with the own outputs, the pass gives
all of them from own points alone, and the patches add what other ranks' points contribute; else it
gives the outputs that read nothing but own points, and the patches the others. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from unisono.topology.decompose import Interval
from unisono.topology.halo import Box, HaloPlan, Piece
from unisono.topology.window import span

__all__ = ["Cover", "Patch", "Received", "cover"]


@dataclass(frozen=True, slots=True)
class Received:
    """A part of what a message brings, and where it stands in a patch's window."""

    message: int
    """Number of the message among the plan's `recvs`."""
    number: int
    """Number of the piece in the message."""
    piece: Piece
    """From a box of that piece (counted from its own start) to a box of the patch's window."""


@dataclass(frozen=True, slots=True)
class Patch:
    """Outputs that read other ranks' points, and the small window that they read."""

    output: Box
    """Which of the own outputs, spatial dims only."""
    window_shape: tuple[int, ...]
    """Sizes of its window in all dims."""
    local: tuple[Piece, ...]
    """Own points in the window; none where the main pass has counted them already."""
    received: tuple[Received, ...]
    """Other ranks' points in the window."""

    @property
    def count(self) -> int:
        """Number of outputs in space."""
        return math.prod(stop - start for start, stop in self.output)


@dataclass(frozen=True, slots=True)
class Cover:
    """The main pass and the patches that make it complete."""

    view: Box
    """Part of the own block that the main pass reads, spatial dims only."""
    padding: tuple[int, ...]
    """Zeros on both sides of it."""
    output: Box
    """Own outputs that the main pass gives."""
    is_whole: bool
    """Whether these are all; patches then add, without bias."""
    patches: tuple[Patch, ...]

    @property
    def has_main(self) -> bool:
        """Whether the main pass gives any output."""
        return all(start < stop for start, stop in self.output)

    @property
    def patched_share(self) -> float:
        """Outputs computed in patches, as a share of those of the main pass."""
        main = math.prod(stop - start for start, stop in self.output)
        return sum(patch.count for patch in self.patches) / main if main else math.inf


@dataclass(frozen=True, slots=True)
class _Dim:
    """One spatial dim of a main pass."""

    view: Interval
    padding: int
    output: Interval


def cover(
    plan: HaloPlan, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int],
    padding: Sequence[tuple[int, int]],
) -> Cover | None:  # fmt: skip
    """Return how the convolution of a plan is done without its window, None where it cannot be.

    Args:
        plan: of the convolution, for a tensor `(N, C, ...)`.
        kernel: one size per spatial dim; likewise `stride`, `dilation` and `(left, right)` padding.
    """
    share = [(s, s + n) for s, n in zip(plan.output_start, plan.output_shape, strict=True)]
    if list(plan.own[:2]) != share[:2] or 0 in plan.output_shape or 0 in plan.block_shape:
        return None
    reach = [span(k, d) for k, d in zip(kernel, dilation, strict=True)]
    first = [s * y[0] - p[0] for s, y, p in zip(stride, share[2:], padding, strict=True)]
    space = list(zip(plan.own[2:], plan.output_shape[2:], first, stride, reach, strict=True))
    whole = [_padded(*dim) for dim in space]
    natural = all(
        set(piece.kinds) == {"copy"}
        and all(
            dest[0] - source[0] == own[0] - low
            for source, dest, own, low in zip(
                piece.source[2:], piece.dest[2:], plan.own[2:], first, strict=True
            )
        )
        for piece in plan.local
    )
    inner = plan.interior[2:]
    if natural and None not in whole:
        main, is_whole = [dim for dim in whole if dim is not None], True
    else:
        main, is_whole = [], False
        for dim, padded, inside in zip(space, whole, inner, strict=True):
            is_free = natural and padded is not None and inside == (0, dim[1])
            main.append(padded if is_free and padded is not None else _inside(*dim))
        inner = tuple(dim.output for dim in main)
    boxes = _around(plan.output_shape[2:], inner)
    return Cover(
        tuple(dim.view for dim in main),
        tuple(dim.padding for dim in main),
        tuple(dim.output for dim in main),
        is_whole,
        tuple(_patch(plan, box, stride, reach, with_local=not is_whole) for box in boxes),
    )


def _padded(own: Interval, n: int, low: int, s: int, reach: int) -> _Dim | None:
    """Return the pass in which torch's symmetric padding gives all `n` outputs of a dim.

    Args:
        own: the own points.
        n: number of own outputs.
        low: first position that they read.
        s: stride.
        reach: positions from the first to the last tap.
    """
    padding = max(own[0] - low, 0)
    start = low + padding
    high = low + s * (n - 1) + reach
    for stop in (own[1], min(high, own[1])):
        if start < stop and (stop - start + 2 * padding - reach) // s + 1 == n:
            return _Dim((start - own[0], stop - own[0]), padding, (0, n))
    return None


def _inside(own: Interval, n: int, low: int, s: int, reach: int) -> _Dim:
    """Return the pass that gives the outputs whose taps are all own points."""
    start = max(0, -(-(own[0] - low) // s))
    stop = min(n, (own[1] - reach - low) // s + 1)
    if start >= stop:
        return _Dim((0, 0), 0, (0, 0))
    begin = low + s * start - own[0]
    return _Dim((begin, begin + s * (stop - 1 - start) + reach), 0, (start, stop))


def _around(sizes: Sequence[int], inner: Sequence[Interval]) -> list[Box]:
    """Return disjoint boxes that make up all outputs but the inner ones."""
    rest: list[Interval] = [(0, n) for n in sizes]
    boxes: list[Box] = []
    for dim, (start, stop) in enumerate(inner):
        for side in ((0, start), (stop, sizes[dim])):
            box = (*rest[:dim], side, *rest[dim + 1 :])
            if all(a < b for a, b in box):
                boxes.append(box)
        rest[dim] = (start, stop)
    return boxes


def _patch(
    plan: HaloPlan, output: Box, stride: Sequence[int], reach: Sequence[int], *, with_local: bool
) -> Patch:
    box: Box = (
        *((0, n) for n in plan.window_shape[:2]),
        *(
            (s * start, s * (stop - 1) + k)
            for (start, stop), s, k in zip(output, stride, reach, strict=True)
        ),
    )
    local = [_within(piece, box) for piece in plan.local] if with_local else []
    received = [
        (m, p, _within(piece, box, from_start=True))
        for m, message in enumerate(plan.recvs)
        for p, piece in enumerate(message.pieces)
    ]
    return Patch(
        output,
        tuple(stop - start for start, stop in box),
        tuple(piece for piece in local if piece is not None),
        tuple(Received(m, p, piece) for m, p, piece in received if piece is not None),
    )


def _within(piece: Piece, box: Box, *, from_start: bool = False) -> Piece | None:
    """Return the part of a piece that lies in a box of the window, placed in that box.

    Sources are counted from the owner's block, or from the start of the piece.
    """
    sources: list[Interval] = []
    dests: list[Interval] = []
    for source, dest, kind, (low, high) in zip(
        piece.source, piece.dest, piece.kinds, box, strict=True
    ):
        start, stop = max(dest[0], low), min(dest[1], high)
        if start >= stop:
            return None
        if kind == "copy":
            taken = (source[0] + start - dest[0], source[0] + stop - dest[0])
        elif kind == "flip":
            taken = (source[1] - (stop - dest[0]), source[1] - (start - dest[0]))
        else:
            taken = source
        shift = source[0] if from_start else 0
        sources.append((taken[0] - shift, taken[1] - shift))
        dests.append((start - low, stop - low))
    return Piece(piece.owner, tuple(sources), tuple(dests), piece.kinds)
