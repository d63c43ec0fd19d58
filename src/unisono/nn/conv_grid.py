"""Which rank convolves what: the grid of weight blocks of a convolution split in channels.

Arithmetic of partitions and channels only; nothing here sends anything.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unisono.errors import PartitionError
from unisono.nn.conv_settings import ConvSettings
from unisono.topology import Partition
from unisono.topology.decompose import Interval, block
from unisono.topology.halo import Box, HaloPlan, Message, Piece


@dataclass(frozen=True)
class Channels:
    """The channels of one place of the grid."""

    outs: Interval
    """Output channels."""
    depth: Interval
    """Range of the weight's dim 1."""
    ins: Interval
    """Input channels that the output channels read."""


@dataclass(frozen=True)
class Run:
    """Output channels that are one ordinary convolution: whole groups, or a part of one."""

    outs: Interval
    """Counted from the first own output channel."""
    ins: Interval
    """Counted from the first own input channel."""
    groups: int


def weight_grid(
    name: str, dims: int, P_x: Partition, P_y: Partition, P_w: Partition, groups: int
) -> Partition:
    """Return `P_w` as batch, output channels, input channels, space; refuse what does not fit."""
    P_x.check_same_root(P_y)
    P_x.check_same_root(P_w)
    shapes = f"P_x {list(P_x.shape)}, P_y {list(P_y.shape)}, P_w {list(P_w.shape)}"
    if P_x.dim != dims + 2 or P_y.dim != dims + 2:
        raise PartitionError.because(
            name,
            shapes,
            f"P_x and P_y have {P_x.dim} and {P_y.dim} dims, a tensor has {dims + 2}",
            "batch, channels and space in both",
        )
    batch, ins, *space = P_x.shape
    outs = P_y.shape[1]
    if P_y.shape[0] != batch or list(P_y.shape[2:]) != space:
        raise PartitionError.because(
            name,
            shapes,
            f"batch and space differ: {[batch, *space]} and {[P_y.shape[0], *P_y.shape[2:]]}",
            "P_x and P_y may differ in dim 1 only",
        )
    wanted = (batch, outs, 1 if groups > 1 else ins, *space)
    short = wanted[1:] if batch == 1 else wanted
    if P_w.shape not in (wanted, short):
        extra = f" (groups={groups} takes 1 in input channels)" if groups > 1 else ""
        raise PartitionError.because(
            name, shapes, f"P_w must be {list(short)}{extra}", f"Partition({list(short)})"
        )
    return P_w.reshape(wanted)


def channels_at(settings: ConvSettings, grid: Partition, index: Sequence[int]) -> Channels:
    """Return the channels of the place at `index` of the grid."""
    outs = block(settings.out_channels, grid.shape[1], index[1])
    per_out, per_in = _per_group(settings)
    depth = block(per_in, grid.shape[2], index[2])
    if settings.groups == 1:
        return Channels(outs, depth, depth)
    c0, c1 = outs
    ins = (c0 // per_out * per_in, -(-c1 // per_out) * per_in) if c0 < c1 else (0, 0)
    return Channels(outs, depth, ins)


def runs_of(settings: ConvSettings, own: Channels) -> list[Run]:
    """Return up to three runs that make up the own output channels: cut group, whole ones, cut."""
    per_out, per_in = _per_group(settings)
    c0, c1 = own.outs
    first, last = -(-c0 // per_out), c1 // per_out
    cuts = [c0, c1] if first > last else sorted({c0, first * per_out, last * per_out, c1})
    runs: list[Run] = []
    for low, high in itertools.pairwise(cuts):
        groups = max(1, (high - low) // per_out)
        start = low // per_out * per_in - own.ins[0]
        runs.append(Run((low - c0, high - c0), (start, start + groups * per_in), groups))
    return runs


def fetch_plan(
    settings: ConvSettings,
    grid: Partition,
    P_x: Partition,
    windows: Mapping[int, HaloPlan],
    given: tuple[int, ...],
) -> HaloPlan:
    """Return how this rank gets, and gives away, the channels that groups need.

    Args:
        settings: of the convolution.
        grid: the weight grid.
        P_x: partition of the input.
        windows: for each rank of `P_x`, its window.
        given: shape of this rank's input.
    """
    me = P_x.root.rank
    sends: list[Message] = []
    recvs: list[Message] = []
    local: tuple[Piece, ...] = ()
    own_shape = windows[me].window_shape if me in windows else given
    own_window: tuple[int, ...] = (0,)
    for place, reader in enumerate(grid.ranks):
        index = grid.index_of(place)
        first, last = channels_at(settings, grid, index).ins
        for owner_index in range(P_x.shape[1]):
            owner = P_x.ranks[P_x.rank_at((index[0], owner_index, *index[3:]))]
            shape = windows[owner].window_shape
            start, stop = block(settings.in_channels, P_x.shape[1], owner_index)
            if reader == me:
                own_window = (shape[0], last - first, *shape[2:])
            low, high = max(start, first), min(stop, last)
            if low >= high or 0 in shape or me not in (owner, reader):
                continue
            piece = _channel_piece(owner, shape, (low - start, high - start), low - first)
            if owner == reader:
                local = (piece,)
            elif me == owner:
                sends.append(Message(reader, (piece,)))
            else:
                recvs.append(Message(owner, (piece,)))
    dims = settings.dims + 2
    return HaloPlan(
        rank=me,
        index=(0,) * dims,
        own=tuple((0, n) for n in own_shape),
        needed=(),
        window_shape=own_window,
        output_shape=(),
        output_start=(),
        segments=((),) * len(own_window),
        local=local,
        sends=tuple(sorted(sends, key=lambda m: m.peer)),
        recvs=tuple(sorted(recvs, key=lambda m: m.peer)),
        interior=((0, 0),) * dims,
    )


def _per_group(settings: ConvSettings) -> tuple[int, int]:
    return settings.out_channels // settings.groups, settings.in_channels // settings.groups


def _channel_piece(owner: int, shape: Sequence[int], channels: Interval, at: int) -> Piece:
    """Return a range of channels of a window, whole in the other dims."""
    full: list[Interval] = [(0, n) for n in shape]
    source: Box = (full[0], channels, *full[2:])
    dest: Box = (full[0], (at, at + channels[1] - channels[0]), *full[2:])
    return Piece(owner, source, dest, ("copy",) * len(full))
