"""What a halo plan says: pieces, messages and the plan of one rank, as frozen values of integers.

Made by `halo.py`, consumed by the halo operators and drawn by `draw.py`. No torch here. What
follows from the values is computed once: a layer asks for it in every call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from unisono.topology.decompose import Interval
from unisono.topology.window import Kind, Segment

__all__ = ["Box", "HaloPlan", "Message", "Piece"]

Box = tuple[Interval, ...]
"""One half-open range a dim."""


@dataclass(frozen=True)
class Piece:
    """A box of one rank's block and the box of another rank's window it fills."""

    owner: int
    """Partition rank that holds the points."""
    source: Box
    """Where in the owner's own block."""
    dest: Box
    """Where in the receiver's window."""
    kinds: tuple[Kind, ...]
    """For each dim: "copy", "flip" (reversed) or "repeat" (one point, many times)."""

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
    pieces: tuple[Piece, ...]
    """The same pieces in the same order at both ends."""

    @cached_property
    def numel(self) -> int:
        """Number of points of the message."""
        return sum(piece.numel for piece in self.pieces)


@dataclass(frozen=True)
class HaloPlan:
    """What one rank does to fill its window; read backwards, how window gradients go home."""

    rank: int
    """Own rank in the partition."""
    index: tuple[int, ...]
    """Own coordinates in the partition."""
    own: Box
    """Own block in global coordinates."""
    needed: Box
    """Points of the tensor right under the window, in global coordinates; may be empty."""
    window_shape: tuple[int, ...]
    """Sizes of the window: the local input of the layer, padding and halos included."""
    output_shape: tuple[int, ...]
    """Own balanced share of the output in every dim."""
    output_start: tuple[int, ...]
    """Where that share begins in the whole output."""
    segments: tuple[tuple[Segment, ...], ...]
    """For each dim, what the window is made of, in global coordinates."""
    local: tuple[Piece, ...]
    """Pieces of the own block that stay here."""
    sends: tuple[Message, ...]
    """One message for each rank that needs own points, ascending."""
    recvs: tuple[Message, ...]
    """One message for each rank whose points are needed here, ascending."""
    interior: tuple[Interval, ...]
    """For each dim, the local outputs that need no other rank's points."""
    fill: float = 0.0
    """Constant written where the window lies outside the tensor."""
    wraps: tuple[tuple[int, int], ...] = ()
    """For each dim, window positions left and right that hold points of the tensor's other end;
    nothing where no dim is padded so."""

    @cached_property
    def block_shape(self) -> tuple[int, ...]:
        """Sizes of the own block: the shape of the tensor that goes in."""
        return tuple(stop - start for start, stop in self.own)

    @cached_property
    def widths(self) -> tuple[tuple[int, int], ...]:
        """For each dim, points needed left and right of the own block; negative: own, unused."""
        return tuple(
            (own[0] - need[0], need[1] - own[1])
            for own, need in zip(self.own, self.needed, strict=True)
        )

    @cached_property
    def fills(self) -> tuple[tuple[int, int], ...]:
        """For each dim, window positions left and right that hold the constant."""
        return tuple(_fills(parts) for parts in self.segments)

    def is_wrapped(self, piece: Piece, dim: int) -> bool:
        """Return whether a piece of this window comes round from the other end of a dim."""
        if not self.wraps:
            return False
        left, right = self.wraps[dim]
        start, stop = piece.dest[dim]
        return stop <= left or start >= self.window_shape[dim] - right

    @cached_property
    def has_fill(self) -> bool:
        """Whether some position of the window is outside the tensor and holds the constant."""
        return any(left or right for left, right in self.fills)

    @cached_property
    def keeps_block(self) -> bool:
        """Whether the window is the own block, untouched (others may still need points of it)."""
        if self.window_shape != self.block_shape or self.recvs:
            return False
        if 0 in self.window_shape:
            return True
        whole = tuple((0, size) for size in self.window_shape)
        return any(
            piece.source == whole == piece.dest and not piece.flips and not piece.repeats
            for piece in self.local
        )

    @cached_property
    def is_identity(self) -> bool:
        """Whether nothing is to be done: the window is the own block and nobody asks for it."""
        return self.keeps_block and not self.sends


def _fills(segments: Sequence[Segment]) -> tuple[int, int]:
    left = right = 0
    for segment in segments:
        if segment.kind == "fill":
            width = segment.dest[1] - segment.dest[0]
            if segment.source[0] < 0:
                left += width
            else:
                right += width
    return left, right
