"""Halo exchanges on paper: what each rank sends, receives and keeps to fill its window.

A `HaloPlan` is a frozen value of integers; the halo operators carry it out. `plan` makes it from
the cuts of the tensor and the kernel alone, so every rank computes its own plan and its partners'
side of it without a message. No torch and no process here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from typing import NamedTuple, cast

from unisono.errors import PartitionError
from unisono.topology.decompose import (
    Interval,
    blocks_over,
    check_cuts,
    flat_index,
    split_cuts,
)
from unisono.topology.window import (
    Kind,
    Segment,
    as_int,
    check_window,
    padding_pairs,
    per_dim,
    window,
)

Box = tuple[Interval, ...]
"""One half-open range per dim."""


class Axis(NamedTuple):
    """One dim of an operation that reads windows."""

    cuts: Sequence[int]
    """Of its outputs."""
    reads: Callable[[int, int], tuple[Segment, ...]]
    """`reads(y0, y1)`: the window that outputs `[y0, y1)` read; the same answer on every rank."""

    def of(self, i: int) -> tuple[Segment, ...]:
        """Return the window of the rank with this index in the dim."""
        return self.reads(self.cuts[i], self.cuts[i + 1])


@dataclass(frozen=True)
class HaloPiece:
    """A box of one rank's block and the box of another rank's window it fills."""

    owner: int
    """Partition rank that holds the points."""
    source: Box
    """Where in the owner's own block."""
    dest: Box
    """Where in the receiver's window."""
    kinds: tuple[Kind, ...]
    """For each dim: "copy", "flip" (reversed), "repeat" (one point many times), "wrap"."""

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the source box, which is what travels."""
        return tuple(stop - start for start, stop in self.source)

    @cached_property
    def numel(self) -> int:
        """Number of points that travel."""
        return math.prod(self.shape)

    @cached_property
    def flips(self) -> tuple[int, ...]:
        """Dims that are reversed on their way."""
        return tuple(dim for dim, kind in enumerate(self.kinds) if kind == "flip")

    @cached_property
    def source_slices(self) -> tuple[slice, ...]:
        """The source box as an index."""
        return tuple(slice(start, stop) for start, stop in self.source)

    @cached_property
    def dest_slices(self) -> tuple[slice, ...]:
        """The box in the window as an index."""
        return tuple(slice(start, stop) for start, stop in self.dest)

    @cached_property
    def repeats(self) -> tuple[int, ...]:
        """Dims in which one point fills the whole of `dest`."""
        return tuple(dim for dim, kind in enumerate(self.kinds) if kind == "repeat")


@dataclass(frozen=True)
class Message:
    """All pieces between two ranks in one direction, in the order in which they are packed."""

    peer: int
    """Partition rank at the other end."""
    pieces: tuple[HaloPiece, ...]
    """The same pieces in the same order at both ends."""

    @cached_property
    def numel(self) -> int:
        """Number of points of the message."""
        return sum(piece.numel for piece in self.pieces)

    @cached_property
    def is_box(self) -> bool:
        """Whether it goes from one box to another as it is."""
        first = self.pieces[0]
        return len(self.pieces) == 1 and not first.flips and not first.repeats


@dataclass(frozen=True)
class HaloPlan:
    """What one rank does to fill its window; read backwards, how window gradients go home."""

    rank: int
    """Own rank in the partition."""
    owned: Box
    """Own block in global coordinates."""
    window_shape: tuple[int, ...]
    """Sizes of the window: the local input of the layer, padding and halos included."""
    local: tuple[HaloPiece, ...]
    """Pieces of the own block that stay here."""
    sends: tuple[Message, ...]
    """One message for each rank that needs own points, ascending."""
    recvs: tuple[Message, ...]
    """One message for each rank whose points are needed here, ascending."""
    index: tuple[int, ...] = ()
    """Own coordinates in the partition. This and the following fields are optional."""
    needed: Box = ()
    """Points of the tensor right under the window, in global coordinates; may be empty."""
    output_shape: tuple[int, ...] = ()
    """Own balanced share of the output in every dim."""
    output_start: tuple[int, ...] = ()
    """Where that share begins in the whole output."""
    segments: tuple[tuple[Segment, ...], ...] = ()
    """For each dim, what the window is made of, in global coordinates."""
    fill: float = 0.0
    """Constant written where the window lies outside the tensor."""

    @cached_property
    def block_shape(self) -> tuple[int, ...]:
        """Sizes of the own block: the shape of the tensor that goes in."""
        return tuple(stop - start for start, stop in self.owned)

    @cached_property
    def widths(self) -> tuple[tuple[int, int], ...]:
        """For each dim, points needed left and right of the own block; negative: own, unused."""
        return tuple(
            (interval[0] - need[0], need[1] - interval[1])
            for interval, need in zip(self.owned, self.needed, strict=True)
        )

    @cached_property
    def fills(self) -> tuple[tuple[int, int], ...]:
        """For each dim, window positions left and right that hold the constant."""
        widths: list[tuple[int, int]] = []
        for segments in self.segments:
            left = right = 0
            for segment in segments:
                width = segment.dest[1] - segment.dest[0]
                if segment.kind == "fill" and segment.source[0] < 0:
                    left += width
                elif segment.kind == "fill":
                    right += width
            widths.append((left, right))
        return tuple(widths)

    @cached_property
    def has_fill(self) -> bool:
        """Whether some position of the window is outside the tensor and holds the constant."""
        return any(left or right for left, right in self.fills)

    @cached_property
    def is_identity(self) -> bool:
        """Whether nothing is to be done: the window is the own block, and no rank reads it."""
        if self.window_shape != self.block_shape or self.recvs or self.sends:
            return False
        whole = tuple((0, size) for size in self.window_shape)
        return 0 in self.window_shape or any(
            piece.source == whole == piece.dest and not piece.flips and not piece.repeats
            for piece in self.local
        )


class _Part(NamedTuple):
    """One dim of a piece."""

    source: Interval
    dest: Interval
    kind: Kind


def plan(
    cuts: Sequence[Sequence[int]],
    index: Sequence[int],
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int | tuple[int, int]] = 0,
    dilation: int | Sequence[int] = 1,
    padding_mode: str = "zeros",
    fill: float = 0.0,
    *,
    ceil_mode: bool = False,
) -> HaloPlan:
    """Return the plan of the rank at `index` for a convolution or pooling.

    Args:
        cuts: for each tensor dim, the cuts `0 = b_0 <= ... <= b_P` of the input; `(0, n)` when the
            dim is not split.
        index: own coordinates, one per dim.
        kernel_size: one int per dim. Fewer than `len(cuts)` belong to the last dims; those before
            (batch, channels) are then taken as they are. One int stands for every dim.
        stride: one int, or one for each dim of the kernel; likewise `dilation`.
        padding: one int, one int or `(left, right)` for each dim of the kernel, "same", "valid".
        padding_mode: "zeros", "reflect", "replicate" or "circular".
        fill: the constant of mode "zeros".
        ceil_mode: outputs are counted as pooling does with this flag (mode "zeros" only).

    >>> p = plan([(0, 5, 10)], (0,), 3, padding=1)
    >>> p.window_shape, p.recvs[0].peer, p.recvs[0].pieces[0].source
    ((7,), 1, ((0, 1),))
    """
    check_cuts(cuts)
    _check_index(cuts, index)
    dims = len(cuts)
    is_one = as_int(kernel_size) is not None
    kernel_dims = dims if is_one else len(cast("Sequence[int]", kernel_size))
    kernel = per_dim(kernel_size, kernel_dims, "kernel_size")
    if len(kernel) > dims:
        raise PartitionError.because(
            f"kernel_size={list(kernel)}",
            f"a tensor of {dims} dims",
            f"{len(kernel)} > {dims}",
            f"at most {dims} sizes, for the last dims",
        )
    count = len(kernel)
    strides = per_dim(stride, count, "stride")
    dilations = per_dim(dilation, count, "dilation")
    paddings = padding_pairs(padding, kernel, strides, dilations)
    if ceil_mode and padding_mode != "zeros":
        raise PartitionError.because(
            f"ceil_mode=True with padding mode {padding_mode!r}", hint='padding_mode="zeros"'
        )

    axes: list[Axis] = []
    for dim, own_cuts in enumerate(cuts):
        at = dim - (dims - count)
        k, s, d = (kernel[at], strides[at], dilations[at]) if at >= 0 else (1, 1, 1)
        left, right = paddings[at] if at >= 0 else (0, 0)
        mode = padding_mode if at >= 0 else "zeros"
        x, parts = own_cuts[-1], len(own_cuts) - 1
        y = check_window(x, k, s, left, right, d, mode, ceil_mode=ceil_mode, dim=dim)
        reads = partial(window, x=x, k=k, s=s, pl=left, pr=right, d=d, mode=mode)
        axes.append(Axis(split_cuts(y, parts), reads))
    return plan_windows(cuts, index, axes, fill=fill)


def plan_widths(
    cuts: Sequence[Sequence[int]],
    index: Sequence[int],
    widths: Sequence[tuple[int, int]],
    padding_mode: str = "zeros",
    fill: float = 0.0,
) -> HaloPlan:
    """Return the plan that gives each balanced block `(left, right)` more points in each dim.

    Fewer widths than dims belong to the last dims. The tensor is padded by as much at its ends.
    """
    return plan(
        cuts, index, [left + right + 1 for left, right in widths], 1, tuple(widths), 1,
        padding_mode, fill,
    )  # fmt: skip


def plan_windows(
    cuts: Sequence[Sequence[int]],
    index: Sequence[int],
    axes: Sequence[Axis],
    *,
    fill: float = 0.0,
) -> HaloPlan:
    """Return the plan for any windows: transposed convolution, upsampling, own stencils.

    Args:
        cuts: for each dim, the cuts of the input.
        index: own coordinates.
        axes: for each dim, the cuts of the outputs and the windows that they read.
        fill: constant of the "fill" segments.
    """
    check_cuts(cuts)
    _check_index(cuts, index)
    grid = tuple(len(own_cuts) - 1 for own_cuts in cuts)
    me = flat_index(grid, index)
    box = tuple((own_cuts[i], own_cuts[i + 1]) for own_cuts, i in zip(cuts, index, strict=True))
    shares = [(axis.cuts[i], axis.cuts[i + 1]) for axis, i in zip(axes, index, strict=True)]
    segments = tuple(axis.of(i) for axis, i in zip(axes, index, strict=True))

    incoming = [_by_owner(parts, own_cuts) for parts, own_cuts in zip(segments, cuts, strict=True)]
    outgoing = [
        _by_reader(axis, size, span) for axis, size, span in zip(axes, grid, box, strict=True)
    ]
    recvs = tuple(_messages(grid, incoming, None))
    sends = tuple(_messages(grid, outgoing, me))
    return HaloPlan(
        rank=me,
        index=tuple(index),
        owned=box,
        needed=tuple(_inside(parts, span) for parts, span in zip(segments, box, strict=True)),
        window_shape=tuple(max((s.dest[1] for s in parts), default=0) for parts in segments),
        output_shape=tuple(stop - start for start, stop in shares),
        output_start=tuple(start for start, _ in shares),
        segments=segments,
        local=next((message.pieces for message in recvs if message.peer == me), ()),
        sends=tuple(message for message in sends if message.peer != me),
        recvs=tuple(message for message in recvs if message.peer != me),
        fill=fill,
    )


def _cut(segment: Segment, low: int, high: int, offset: int) -> _Part:
    """Return the part of a segment with sources `[low, high)` of its own, counted from `offset`."""
    (d0, d1), (s0, s1), kind = segment
    if kind == "repeat":
        dest = (d0, d1)
    elif kind == "flip":
        dest = (d0 + s1 - high, d0 + s1 - low)
    else:
        dest = (d0 + low - s0, d0 + high - s0)
    return _Part((low - offset, high - offset), dest, kind)


def _by_owner(segments: Sequence[Segment], cuts: Sequence[int]) -> dict[int, list[_Part]]:
    """Return, for each index of the dim that owns points of the window, its parts."""
    parts_of: dict[int, list[_Part]] = {}
    for segment in segments:
        if segment.kind != "fill":
            for owner, low, high in blocks_over(cuts, *segment.source):
                parts_of.setdefault(owner, []).append(_cut(segment, low, high, cuts[owner]))
    return {owner: _in_order(parts_of[owner]) for owner in sorted(parts_of)}


def _by_reader(axis: Axis, size: int, interval: Interval) -> dict[int, list[_Part]]:
    """Return, for each index of the dim whose window reads own points, the parts it reads."""
    parts_of: dict[int, list[_Part]] = {}
    if interval[0] == interval[1]:
        return parts_of
    for reader in range(size):
        parts: list[_Part] = []
        for segment in axis.of(reader):
            low, high = max(segment.source[0], interval[0]), min(segment.source[1], interval[1])
            if low < high and segment.kind != "fill":
                parts.append(_cut(segment, low, high, interval[0]))
        if parts:
            parts_of[reader] = _in_order(parts)
    return parts_of


def _in_order(parts: list[_Part]) -> list[_Part]:
    """Sort by place in the window: both ends of a message list its pieces so."""
    return sorted(parts, key=lambda part: part.dest) if len(parts) > 1 else parts


def _messages(
    grid: Sequence[int], by_dim: Sequence[dict[int, list[_Part]]], owner: int | None
) -> Iterator[Message]:
    """Multiply the dims. `owner` owns all pieces; None: each peer owns its own."""
    for peer_index in product(*by_dim):
        peer = flat_index(grid, peer_index)
        held_by = peer if owner is None else owner
        parts = [of[i] for of, i in zip(by_dim, peer_index, strict=True)]
        pieces = tuple(
            HaloPiece(
                held_by,
                tuple(part.source for part in combination),
                tuple(part.dest for part in combination),
                tuple(part.kind for part in combination),
            )
            for combination in product(*parts)
        )
        yield Message(peer, pieces)


def _inside(segments: Sequence[Segment], interval: Interval) -> Interval:
    """Return the hull of what a window copies; `own`'s start when it copies nothing."""
    copied = [segment.source for segment in segments if segment.kind == "copy"]
    if not copied:
        return interval[0], interval[0]
    return min(start for start, _ in copied), max(stop for _, stop in copied)


def _check_index(cuts: Sequence[Sequence[int]], index: Sequence[int]) -> None:
    grid = [len(own_cuts) - 1 for own_cuts in cuts]
    if len(index) != len(grid) or any(not 0 <= i < n for i, n in zip(index, grid, strict=True)):
        raise PartitionError.because(
            f"plan of index {list(index)}",
            f"cuts of a partition of shape {grid}",
            f"coordinates of the last rank are {[n - 1 for n in grid]}",
            f"one coordinate for each of the {len(grid)} dims, such as index={[0] * len(grid)}",
        )
