"""Convolutions split in channels too: windows to every rank that needs them, partial sums back.

Input on `P_x`, weight blocks on `P_w`, output on `P_y`. Each rank of `P_w` convolves the window of
its input channels with its block of the weight; sums over input channels meet on `P_y`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from unisono.comm import Communicator
from unisono.errors import PartitionError
from unisono.nn.conv_settings import ConvSettings, Overlap, Size, conv_settings
from unisono.nn.parameters import (
    Holding,
    Weights,
    check_weights,
    draw_weight_and_bias,
    nothing,
    replicated_or_root,
)
from unisono.nn.state import HoldingModule
from unisono.nn.structure import Cuts, Table
from unisono.operators.halo import HaloExchange, HaloOnGroup
from unisono.operators.partitioned import FanPlan, collect, fan_plan, spread
from unisono.topology import Partition, halo
from unisono.topology.decompose import block
from unisono.topology.fanout import broadcast_groups, reduce_groups
from unisono.topology.halo_plan import Box, HaloPlan, Message, Piece

__all__ = [
    "DistributedChannelConv1d",
    "DistributedChannelConv2d",
    "DistributedChannelConv3d",
    "DistributedGeneralConv1d",
    "DistributedGeneralConv2d",
    "DistributedGeneralConv3d",
]


@dataclass(frozen=True)
class _GeneralPlan:
    """What one rank does: fill a window, pass it on, convolve, add up."""

    window: HaloPlan | None
    """On a rank of `P_x`."""
    to_weights: FanPlan | None
    """Windows from `P_x` to `P_w`; None where channels of groups are fetched instead."""
    fetch: HaloPlan | None
    """With groups: channels of the windows that this rank of `P_w` needs."""
    to_outputs: FanPlan
    """Partial sums from `P_w` to `P_y`."""
    partial_shape: tuple[int, ...]
    """Shape of the local convolution on a rank of `P_w`."""


class _GeneralConv(HoldingModule[_GeneralPlan]):
    dims: ClassVar[int]

    def __init__(
        self,
        P_x: Partition,
        P_y: Partition,
        P_w: Partition,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size | str = 0,
        padding_mode: str = "zeros",
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
        overlap: Overlap = "auto",
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        weights: Weights = "replicated",
    ) -> None:
        super().__init__()
        name = type(self).__name__
        self.P_x, self.P_y, self.P_w = P_x, P_y, P_w
        self.settings: ConvSettings = conv_settings(
            name, self.dims, in_channels, out_channels, kernel_size, stride, padding,
            padding_mode, dilation, groups,
        )  # fmt: skip
        self.overlap = overlap
        self.weights: Weights = check_weights(weights)
        self.use_bias = bias
        self._grid = _weight_grid(name, self.dims, P_x, P_y, P_w, groups)
        weight, own_bias = self._own_blocks()
        self.stores_bias = own_bias is not None and 0 not in own_bias.shape
        self.receives_bias = bias and self._weight_index is not None and self._weight_index[2] == 0
        drawn = draw_weight_and_bias(self._control(), weight, own_bias, dtype=dtype, device=device)
        self.weight, self.bias = drawn
        self._hold("weight", weight, replicated=False)
        if own_bias is not None:
            self._hold("bias", own_bias, replicated=False)

    @property
    def _weight_index(self) -> tuple[int, ...] | None:
        """Own place in the weight grid: batch, output channels, input channels, space."""
        if not self.P_w.active:
            return None
        return self._grid.index_of(self._grid.ranks.index(self.P_w.root.rank))

    def _own_blocks(self) -> tuple[Holding, Holding | None]:
        """Return which blocks of weight and bias this rank holds."""
        shape = self.settings.weight_shape
        index = self._weight_index
        is_holder = index is not None and (
            self.weights == "replicated" or all(i == 0 for i in (index[0], *index[3:]))
        )
        if index is None or not is_holder:
            return nothing(shape), nothing(shape[:1]) if self.use_bias else None
        (c0, c1), (k0, k1) = self._channel_blocks(index)
        start = (c0, k0, *(0,) * self.dims)
        sizes = (c1 - c0, k1 - k0, *self.settings.kernel_size)
        if not self.use_bias:
            return Holding(shape, start, sizes), None
        has_bias = index[2] == 0
        own = Holding(shape[:1], (c0,), (c1 - c0,)) if has_bias else nothing(shape[:1])
        return Holding(shape, start, sizes), own

    def _channel_blocks(self, index: Sequence[int]) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return own output channels, and own range of the weight's dim 1."""
        outs = block(self.settings.out_channels, self._grid.shape[1], index[1])
        depth = self.settings.in_channels // self.settings.groups
        return outs, block(depth, self._grid.shape[2], index[2])

    def _describe(self) -> tuple[object, ...]:
        return (self.P_x, self.P_y, self.P_w, self.settings, self.use_bias, self.weights)

    def _halo_at(self, cuts: Cuts, index: Sequence[int]) -> HaloPlan:
        s = self.settings
        return halo.plan(
            cuts, index, s.kernel_size, s.stride, s.padding, s.dilation, s.padding_mode
        )

    def _make_plan(self, tables: Sequence[Table]) -> _GeneralPlan:
        (table,) = tables
        dtype = table.dtype(self.P_x)
        cuts = table.cuts(self.P_x)
        if cuts[1][-1] != self.settings.in_channels:
            raise PartitionError.because(
                f"{type(self).__name__}(in_channels={self.settings.in_channels})",
                f"an input of global shape {[own[-1] for own in cuts]}",
                f"{cuts[1][-1]} channels != {self.settings.in_channels}",
                f"in_channels={cuts[1][-1]}",
            )
        root = self.P_x.root
        batch, outs, _ins, *space = self._grid.shape
        few_x = self.P_x.reshape((batch, 1, self.P_x.shape[1], *space))
        few_y = self.P_y.reshape((batch, outs, 1, *space))
        windows = {
            rank: self._halo_at(cuts, self.P_x.index_of(place))
            for place, rank in enumerate(self.P_x.ranks)
        }
        fetch, to_weights = None, None
        if self.settings.groups > 1:
            fetch = self._fetching(windows, table.of(root.rank).shape)
        else:
            groups = broadcast_groups(few_x, self._grid)
            shapes = [windows[group.root].window_shape for group in groups]
            to_weights = fan_plan(groups, root, shapes, dtype)
        partials = {
            rank: self._partial_shape(windows, place) for place, rank in enumerate(self._grid.ranks)
        }
        sums = reduce_groups(self._grid, few_y)
        mine = table.of(root.rank).shape
        empty = (mine[0], 0) if mine else (0,)
        to_outputs = fan_plan(
            sums, root, [partials[group.peers[0]] for group in sums], dtype, empty=empty
        )
        return _GeneralPlan(
            windows.get(root.rank),
            to_weights,
            fetch,
            to_outputs,
            partials.get(root.rank, (0,)),
        )

    def _partial_shape(self, windows: dict[int, HaloPlan], place: int) -> tuple[int, ...]:
        index = self._grid.index_of(place)
        source = self.P_x.rank_at((index[0], 0, *index[3:]))
        share = windows[self.P_x.ranks[source]].output_shape
        (c0, c1), _ = self._channel_blocks(index)
        return (share[0], c1 - c0, *share[2:])

    def _fetching(self, windows: dict[int, HaloPlan], given: tuple[int, ...]) -> HaloPlan:
        """Return how this rank gets, and gives away, the channels that groups need."""
        me = self.P_x.root.rank
        sends: list[Message] = []
        recvs: list[Message] = []
        local: tuple[Piece, ...] = ()
        own_shape = windows[me].window_shape if me in windows else given
        own_window: tuple[int, ...] = (0,)
        for place, reader in enumerate(self._grid.ranks):
            index = self._grid.index_of(place)
            first, last = self._input_channels(index)
            for owner_index in range(self.P_x.shape[1]):
                owner = self.P_x.ranks[self.P_x.rank_at((index[0], owner_index, *index[3:]))]
                shape = windows[owner].window_shape
                start, stop = block(self.settings.in_channels, self.P_x.shape[1], owner_index)
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
        dims = self.dims + 2
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

    def _input_channels(self, index: Sequence[int]) -> tuple[int, int]:
        """Return the input channels that the output channels at a place of the grid need."""
        s = self.settings
        (c0, c1), _ = self._channel_blocks(index)
        per_out, per_in = s.out_channels // s.groups, s.in_channels // s.groups
        if c0 == c1:
            return 0, 0
        return c0 // per_out * per_in, -(-c1 // per_out) * per_in

    def _gradient_comm(self, name: str) -> Communicator | None:  # noqa: ARG002
        if self._weight_index is None or self.weights != "replicated":
            return None
        return self._replicas().comm

    def _replicas(self) -> Partition:
        """Return the ranks that use this rank's weight block."""
        axes = (0, *range(3, self._grid.dim))
        place = self._grid.ranks.index(self.P_w.root.rank)
        return self._grid.sub(axes, rank=place)

    def _parameters_here(self) -> tuple[Tensor, Tensor | None]:
        held = (self.weight,)
        if self.bias is not None and self.receives_bias:
            held = (self.weight, self.bias)
        index = self._weight_index
        if index is None:  # only ranks of the weight's partition come here
            raise PartitionError(f"{self.P_w!r} has no place for this rank")
        (c0, c1), (k0, k1) = self._channel_blocks(index)
        shapes: list[tuple[int, ...]] = [(c1 - c0, k1 - k0, *self.settings.kernel_size)]
        if len(held) > 1:
            shapes.append((c1 - c0,))
        w, *b = replicated_or_root(
            self._replicas(), self.weights, shapes, held, sums=self._sums_gradients
        )
        return w, b[0] if b else None

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's balanced share of the convolution on `P_y`."""
        if not self._takes_part:
            return self._outside(x)
        plan = self._plan
        held = self._tied(x)
        if plan.window is not None and not plan.window.is_identity:
            on_group = HaloOnGroup(self.P_x.root, plan.window, self.P_x.ranks, 0.0)
            held = HaloExchange.apply(held, on_group)
        if plan.to_weights is not None:
            held = spread(held, plan.to_weights)
        elif plan.fetch is not None:
            held = HaloExchange.apply(held, HaloOnGroup(self.P_x.root, plan.fetch, None, 0.0))
        if self.P_w.active:
            held = self._convolved(held)
        return collect(held, plan.to_outputs)

    def _convolved(self, window: Tensor) -> Tensor:
        weight, bias = self._parameters_here()
        shape = self._plan.partial_shape
        if 0 in shape or 0 in weight.shape:
            zero = window.sum() * 0 + weight.sum() * 0
            if bias is not None:
                zero = zero + bias.sum() * 0
            y = zero.expand(shape)
            return y if bias is None else y + bias.reshape(1, -1, *(1,) * self.dims)
        if self.settings.groups == 1:
            return self.settings.convolved(window, weight, bias)
        return self._by_groups(window, weight, bias)

    def _by_groups(self, window: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Convolve up to three runs of channels: a cut group, whole groups, a cut group."""
        s = self.settings
        per_out, per_in = s.out_channels // s.groups, s.in_channels // s.groups
        index = self._weight_index
        if index is None:  # only ranks of the weight's partition come here
            raise PartitionError(f"{self.P_w!r} has no place for this rank")
        (c0, c1), _ = self._channel_blocks(index)
        first = c0 // per_out
        whole = -(-c0 // per_out), c1 // per_out
        runs: list[tuple[int, int, int]] = []
        if whole[0] > whole[1]:
            runs.append((c0, c1, 1))
        else:
            if c0 < whole[0] * per_out:
                runs.append((c0, whole[0] * per_out, 1))
            if whole[0] < whole[1]:
                runs.append((whole[0] * per_out, whole[1] * per_out, whole[1] - whole[0]))
            if whole[1] * per_out < c1:
                runs.append((whole[1] * per_out, c1, 1))
        parts: list[Tensor] = []
        for low, high, groups in runs:
            inputs = (low // per_out - first) * per_in
            part = window.narrow(1, inputs, groups * per_in)
            rows = slice(low - c0, high - c0)
            own = None if bias is None else bias[rows]
            parts.append(s.convolved(part, weight[rows], own, groups))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _channel_piece(owner: int, shape: Sequence[int], channels: tuple[int, int], at: int) -> Piece:
    """Return a range of channels of a window, whole in the other dims."""
    full: list[tuple[int, int]] = [(0, n) for n in shape]
    source: Box = (full[0], channels, *full[2:])
    dest: Box = (full[0], (at, at + channels[1] - channels[0]), *full[2:])
    return Piece(owner, source, dest, ("copy",) * len(full))


def _weight_grid(
    name: str, dims: int, P_x: Partition, P_y: Partition, P_w: Partition, groups: int
) -> Partition:
    """Return `P_w` as batch, output channels, input channels, space; refuse what does not fit."""
    P_x.check_same_root(P_y)
    P_x.check_same_root(P_w)
    shapes = f"P_x {list(P_x.shape)}, P_y {list(P_y.shape)}, P_w {list(P_w.shape)}"

    def refuse(rule: str, hint: str) -> PartitionError:
        error = PartitionError.because(name, shapes, rule, hint)
        return error if isinstance(error, PartitionError) else PartitionError(str(error))

    if P_x.dim != dims + 2 or P_y.dim != dims + 2:
        raise refuse(
            f"P_x and P_y have {P_x.dim} and {P_y.dim} dims, a tensor has {dims + 2}",
            "batch, channels and space in both",
        )
    batch, ins, *space = P_x.shape
    outs = P_y.shape[1]
    if P_y.shape[0] != batch or list(P_y.shape[2:]) != space:
        raise refuse(
            f"batch and space differ: {[batch, *space]} and {[P_y.shape[0], *P_y.shape[2:]]}",
            "P_x and P_y may differ in dim 1 only",
        )
    ins_w = 1 if groups > 1 else ins
    wanted = (batch, outs, ins_w, *space)
    short = wanted[1:]
    if P_w.shape not in (wanted, short if batch == 1 else wanted):
        extra = f" (groups={groups} takes 1 in input channels)" if groups > 1 else ""
        raise refuse(
            f"P_w must be {list(short if batch == 1 else wanted)}{extra}",
            f"Partition({list(short if batch == 1 else wanted)})",
        )
    return P_w.reshape(wanted)


class DistributedGeneralConv1d(_GeneralConv):
    """`torch.nn.Conv1d` of a tensor split in batch, channels and length."""

    dims = 1


class DistributedGeneralConv2d(_GeneralConv):
    """`torch.nn.Conv2d` of a tensor split in batch, channels and space."""

    dims = 2


class DistributedGeneralConv3d(_GeneralConv):
    """`torch.nn.Conv3d` of a tensor split in batch, channels and space."""

    dims = 3


class DistributedChannelConv1d(_GeneralConv):
    """`torch.nn.Conv1d` of a tensor split in channels."""

    dims = 1


class DistributedChannelConv2d(_GeneralConv):
    """`torch.nn.Conv2d` of a tensor split in channels."""

    dims = 2


class DistributedChannelConv3d(_GeneralConv):
    """`torch.nn.Conv3d` of a tensor split in channels."""

    dims = 3
