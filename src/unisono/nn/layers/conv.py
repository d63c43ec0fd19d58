"""`DistributedConv1d/2d/3d`: convolutions split in batch and space, and in channels too.

Split in space (and batch) alone, a rank gets halos from its neighbours and convolves its share.
Split in channels too, the input lies on `P_x`, blocks of the weight on `P_w`, the output on `P_y`:
each rank of `P_w` gets the windows of its input channels, convolves them with its block, and sums
over input channels meet on `P_y`.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from unisono.errors import PartitionError
from unisono.expect import expect, expect_choice
from unisono.nn.agreement import INPUTS, Cuts, Table
from unisono.nn.module import Module
from unisono.nn.parameters import (
    Holding,
    WeightGrid,
    Weights,
    check_weights,
    nothing,
    part,
    whole,
)
from unisono.nn.planned import check_dims, check_sizes, collect_products, index_in
from unisono.nn.split_tensors.convolution import (
    ConvSettings,
    Overlap,
    SpacePlan,
    convolved_in_space,
    empty_output,
    space_plan,
)
from unisono.nn.state import HoldingModule
from unisono.operators.halo import HaloExchangeMap, HaloOnGroup
from unisono.operators.partitioned import FanPlan, spread
from unisono.topology import Partition, halo
from unisono.topology.decompose import Interval, block
from unisono.topology.halo import Box, HaloPiece, HaloPlan, Message
from unisono.topology.window import PADDING_MODES, padding_pairs, per_dim

Size = int | Sequence[int]


def conv_settings(
    name: str,
    dims: int,
    in_channels: int,
    out_channels: int,
    kernel_size: Size,
    stride: Size,
    padding: Size | str,
    padding_mode: str,
    dilation: Size,
    groups: int,
) -> ConvSettings:
    """Return the settings for `dims` spatial dims; refuse what torch would refuse."""
    kernel = per_dim(kernel_size, dims, "kernel_size")
    strides = per_dim(stride, dims, "stride")
    dilations = per_dim(dilation, dims, "dilation")
    expect_choice("padding_mode", padding_mode, PADDING_MODES, error=PartitionError)
    for what, count in (("in_channels", in_channels), ("out_channels", out_channels)):
        if count < 1 or groups < 1 or count % groups:
            raise PartitionError.because(
                f"{name}({what}={count}, groups={groups})",
                "channels must be a positive multiple of groups",
                f"{count} / {groups} = {count / groups:g}" if groups else None,
                "groups=1",
            )
    pads = padding_pairs(
        cast("int | str | Sequence[int | tuple[int, int]]", padding), kernel, strides, dilations
    )
    return ConvSettings(
        operator.index(in_channels), operator.index(out_channels), kernel, strides, pads, dilations,
        operator.index(groups), padding_mode,
    )  # fmt: skip


def _as_torch(pairs: Sequence[tuple[int, int]]) -> tuple[int, ...] | tuple[tuple[int, int], ...]:
    if any(left != right for left, right in pairs):
        return tuple(pairs)
    return tuple(left for left, _right in pairs)


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
class ChannelRun:
    """Output channels that are one ordinary convolution: whole groups, or a part of one."""

    outs: Interval
    """Counted from the first own output channel."""
    ins: Interval
    """Counted from the first own input channel."""
    groups: int


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


def runs_of(settings: ConvSettings, channels: Channels) -> list[ChannelRun]:
    """Return up to three runs that make up the own output channels: cut group, whole ones, cut."""
    per_out, per_in = _per_group(settings)
    c0, c1 = channels.outs
    first, last = -(-c0 // per_out), c1 // per_out
    cuts = [c0, c1] if first > last else sorted({c0, first * per_out, last * per_out, c1})
    runs: list[ChannelRun] = []
    for low, high in itertools.pairwise(cuts):
        groups = max(1, (high - low) // per_out)
        start = low // per_out * per_in - channels.ins[0]
        runs.append(ChannelRun((low - c0, high - c0), (start, start + groups * per_in), groups))
    return runs


def fetch_plan(
    settings: ConvSettings,
    grid: Partition,
    P_x: Partition,
    windows: Mapping[int, HaloPlan],
    block_shape: tuple[int, ...],
) -> HaloPlan:
    """Return how this rank gets, and gives away, the channels that groups need.

    Args:
        settings: of the convolution.
        grid: the weight grid.
        P_x: partition of the input.
        windows: for each rank of `P_x`, its window.
        block_shape: shape of this rank's input.
    """
    me = P_x.root.rank
    sends: list[Message] = []
    recvs: list[Message] = []
    local: tuple[HaloPiece, ...] = ()
    own_shape = windows[me].window_shape if me in windows else block_shape
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
    return HaloPlan(
        rank=me,
        owned=tuple((0, n) for n in own_shape),
        window_shape=own_window,
        local=local,
        sends=tuple(sorted(sends, key=lambda m: m.peer)),
        recvs=tuple(sorted(recvs, key=lambda m: m.peer)),
    )


def _per_group(settings: ConvSettings) -> tuple[int, int]:
    return settings.out_channels // settings.groups, settings.in_channels // settings.groups


def _channel_piece(owner: int, shape: Sequence[int], channels: Interval, at: int) -> HaloPiece:
    """Return a range of channels of a window, whole in the other dims."""
    full: list[Interval] = [(0, n) for n in shape]
    source: Box = (full[0], channels, *full[2:])
    dest: Box = (full[0], (at, at + channels[1] - channels[0]), *full[2:])
    return HaloPiece(owner, source, dest, ("copy",) * len(full))


@dataclass(frozen=True)
class _GeneralPlan:
    """What one rank does: fill a window, pass it on, convolve, add up."""

    halo: HaloPlan | None
    """Of the window, on a rank of `P_x`."""
    to_weights: FanPlan | None
    """Windows from `P_x` to `P_w`; None where channels of groups are fetched instead."""
    fetch: HaloPlan | None
    """With groups: channels of the windows that this rank of `P_w` needs."""
    to_outputs: FanPlan
    """Partial sums from `P_w` to `P_y`."""
    partial_shape: tuple[int, ...]
    """Shape of the local convolution on a rank of `P_w`."""


class _GeneralConv(HoldingModule[_GeneralPlan | SpacePlan]):
    """Where only space and batch are split, its plan is that of the spatial convolution."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    dims: ClassVar[int]
    output_padding: tuple[int, ...] | None = None
    """Of a transposed convolution alone."""

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
        s = conv_settings(
            name, self.dims, in_channels, out_channels, kernel_size, stride, padding,
            padding_mode, dilation, groups,
        )  # fmt: skip
        s = self.settings = replace(s, output_padding=self.output_padding)
        if overlap not in ("auto", True, False):
            raise PartitionError(f'{name}(overlap={overlap!r})\n  HINT: "auto", True or False')
        self.in_channels, self.out_channels, self.groups = s.in_channels, s.out_channels, s.groups
        self.kernel_size, self.stride, self.dilation = s.kernel_size, s.stride, s.dilation
        self.padding_mode = s.padding_mode
        self.padding = padding if isinstance(padding, str) else _as_torch(s.padding)
        """As torch has it: a word, or one int a dim; pairs if the two sides of a dim differ."""
        self.overlap: Overlap = overlap
        self.weights: Weights = check_weights(weights)
        self.use_bias = bias
        self.P_x, self.P_y, self.P_w = P_x, P_y, P_w
        for partition in (P_x, P_y):
            check_dims(name, partition, self.dims + 2, self.dims + 2)
        note = f" (groups={groups} takes 1 in input channels)" if groups > 1 else ""
        grid = WeightGrid(name, P_x, P_y, P_w, 1, 1 if groups > 1 else None, note)
        self._weight_grid, self._grid, self._index = grid, grid.ranks, grid.index
        is_uncut = self._grid.shape[1] == self._grid.shape[2] == P_x.shape[1] == 1
        self._is_spatial = P_x.ranks == P_y.ranks == P_w.ranks and is_uncut
        self._channels = (
            None if self._index is None else channels_at(self.settings, self._grid, self._index)
        )
        weight, own_bias = self._own_blocks()
        self._names = ("weight", "bias") if self.receives_bias else ("weight",)
        everywhere = is_uncut and weights == "replicated" and P_w.size == P_w.root.size
        self._draw(weight, own_bias, replicated=everywhere, dtype=dtype, device=device)

    @property
    def stores_bias(self) -> bool:
        """Whether the bias is stored on this rank."""
        return "bias" in self._holdings and 0 not in self._holdings["bias"].shape

    @property
    def receives_bias(self) -> bool:
        """Whether this rank computes with the bias."""
        return self.use_bias and self._index is not None and self._index[2] == 0

    def _describe(self) -> tuple[object, ...]:
        # Messages are the same either way: each rank may choose for itself.
        return tuple(pair for pair in super()._describe() if pair != ("overlap", self.overlap))

    def _own_blocks(self) -> tuple[Holding, Holding | None]:
        """Return which blocks of weight and bias this rank holds."""
        shape, biases, index = self.settings.weight_shape, (self.out_channels,), self._index
        stored, stored_bias = nothing(shape), nothing(biases)
        if index is not None and self._channels is not None:
            outs = {0: self._channels.outs}
            spatial = self._is_spatial
            used = whole(shape) if spatial else part(shape, {**outs, 1: self._channels.depth})
            used_bias = part(biases, outs)
            self._shapes = used.shape, used_bias.shape
            if self.weights == "replicated" or not any((index[0], *index[3:])):
                stored = used
                if index[2] == 0:
                    stored_bias = used_bias
        return stored, stored_bias if self.use_bias else None

    def _users(self, name: str) -> Partition | None:  # noqa: ARG002
        return self._weight_grid.users

    def _make_plan(self, tables: Sequence[Table]) -> _GeneralPlan | SpacePlan:
        (table,) = tables
        dtype = table.dtype(self.P_x)
        cuts = table.cuts(self.P_x)
        check_sizes(type(self).__name__, [self.in_channels], [1], [cut[-1] for cut in cuts])
        root = self.P_x.root
        if self._is_spatial:
            return self._space_plan(cuts)
        windows = {
            rank: self._halo_at(cuts, self.P_x.index_of(place))
            for place, rank in enumerate(self.P_x.ranks)
        }
        block_shape = table.of(root.rank).shape
        fetch, to_weights = None, None
        if self.settings.groups > 1:
            fetch = fetch_plan(self.settings, self._grid, self.P_x, windows, block_shape)
        else:
            shapes = {rank: window.window_shape for rank, window in windows.items()}
            to_weights = self._weight_grid.to_weights(shapes, dtype)
        partials: dict[int, tuple[int, ...]] = {}
        for place, rank in enumerate(self._grid.ranks):
            index = self._grid.index_of(place)
            share = windows[self._weight_grid.source(index)].output_shape
            c0, c1 = channels_at(self.settings, self._grid, index).outs
            partials[rank] = (share[0], c1 - c0, *share[2:])
        to_outputs = self._weight_grid.to_outputs(partials, dtype, block_shape)
        return _GeneralPlan(
            windows.get(root.rank), to_weights, fetch, to_outputs, partials.get(root.rank, (0,))
        )

    def _space_plan(self, cuts: Cuts) -> SpacePlan:
        window = self._halo_at(cuts, index_in(self.P_x))
        exchange = HaloOnGroup(self.P_x.root, window, self.P_x.ranks, 0.0)
        return space_plan(self.settings, exchange, self.overlap)

    def _halo_at(self, cuts: Cuts, index: Sequence[int]) -> HaloPlan:
        s = self.settings
        return halo.plan(
            cuts, index, s.kernel_size, s.stride, s.padding, s.dilation, s.padding_mode
        )

    def forward(self, input: Tensor) -> Tensor:
        """Return this rank's balanced share of the convolution on `P_y`."""
        if not self._takes_part:
            return self._outside(input)
        plan = self._plan
        if isinstance(plan, SpacePlan):
            weight, *bias = self._used(self._names, self._shapes)
            tied = self._tied(input, least=INPUTS)
            return convolved_in_space(tied, weight, bias[0] if bias else None, plan)
        window = self._window(input)
        if plan.to_weights is not None:
            window = spread(window, plan.to_weights)
        elif plan.fetch is not None:
            if window.numel() == 0:  # a rank without a block may not know the dtype of the data
                window = window.to(plan.to_outputs.dtype)
            window = HaloExchangeMap.apply(
                window, HaloOnGroup(self.P_x.root, plan.fetch, None, 0.0)
            )
        if self._channels is not None:
            window = self._convolved(window, plan.partial_shape, self._channels)
        return collect_products(window, plan.to_outputs)

    def _convolved(self, window: Tensor, shape: tuple[int, ...], channels: Channels) -> Tensor:
        """Convolve with the own weight block; groups that a rank border cuts, one by one."""
        weight, *bias_or_none = self._used(self._names, self._shapes)
        bias = bias_or_none[0] if bias_or_none else None
        if 0 in shape or 0 in weight.shape:
            y = empty_output(window, weight, shape)
            return y if bias is None else y + bias.reshape(1, -1, *(1,) * self.dims)
        if self.settings.groups == 1:
            return self.settings.convolved(window, weight, bias)
        parts: list[Tensor] = []
        for run in runs_of(self.settings, channels):
            rows = slice(*run.outs)
            part = window.narrow(1, run.ins[0], run.ins[1] - run.ins[0])
            shift = None if bias is None else bias[rows]
            parts.append(self.settings.convolved(part, weight[rows], shift, groups=run.groups))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


class FeatureConv(_GeneralConv):
    """A convolution whose input and output are split in batch and space, not in channels."""

    def __init__(
        self,
        P_x: Partition,
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
        if P_x.dim != self.dims + 2 or P_x.shape[1] != 1:
            raise PartitionError.because(
                f"{type(self).__name__} on {P_x!r}",
                f"{P_x.dim} dims, {P_x.shape[1] if P_x.dim > 1 else '?'} in channels",
                f"needs {self.dims + 2} dims with 1 in dim 1",
                f"Partition([1, 1, {', '.join(['2'] * self.dims)}])",
            )
        batch, channels, *space = P_x.shape
        super().__init__(
            P_x, P_x, P_x.reshape((batch, channels, channels, *space)), in_channels, out_channels,
            kernel_size, stride, padding, padding_mode, dilation, groups, bias, overlap,
            device=device, dtype=dtype, weights=weights,
        )  # fmt: skip


class DistributedFeatureConv1d(FeatureConv):
    """`torch.nn.Conv1d` of a tensor `(N, C, L)` split in N and L."""

    dims = 1


class DistributedFeatureConv2d(FeatureConv):
    """`torch.nn.Conv2d` of a tensor `(N, C, H, W)` split in N, H and W."""

    dims = 2


class DistributedFeatureConv3d(FeatureConv):
    """`torch.nn.Conv3d` of a tensor `(N, C, D, H, W)` split in N, D, H and W."""

    dims = 3


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


_KINDS: dict[int, tuple[Callable[..., Module], ...]] = {
    1: (DistributedFeatureConv1d, DistributedChannelConv1d, DistributedGeneralConv1d),
    2: (DistributedFeatureConv2d, DistributedChannelConv2d, DistributedGeneralConv2d),
    3: (DistributedFeatureConv3d, DistributedChannelConv3d, DistributedGeneralConv3d),
}


def choose(
    dims: int,
    kinds: Sequence[Callable[..., Module]],
    P_x: Partition,
    P_y: Partition | None,
    P_w: Partition | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Module:
    """Return one of three kinds (feature, channel, general), made with the partitions it takes."""
    feature, channel, general = kinds
    for name, partition in (("P_y", P_y), ("P_w", P_w)):
        hint = f"DistributedConv{dims}d(P_x, in_channels=3, out_channels=8, kernel_size=3)"
        expect(name, partition, (Partition, type(None)), hint)
    if P_y is None and P_w is None:
        return feature(P_x, *args, **kwargs)
    if P_y is None or P_w is None:
        raise PartitionError.because(
            f"DistributedConv{dims}d",
            f"P_x={P_x!r}, P_y={P_y!r}, P_w={P_w!r}",
            "P_x alone, or all three",
            "leave P_y and P_w out, or give both",
        )
    is_unsplit = math.prod(P_x.shape[2:]) == math.prod(P_y.shape[2:]) == 1
    return (channel if is_unsplit else general)(P_x, P_y, P_w, *args, **kwargs)


def DistributedConv1d(
    P_x: Partition,
    P_y: Partition | None = None,
    P_w: Partition | None = None,
    *args: Any,
    **kwargs: Any,
) -> Module:
    """Return the 1-d convolution for these partitions: feature, channel or general."""
    return choose(1, _KINDS[1], P_x, P_y, P_w, args, kwargs)


def DistributedConv2d(
    P_x: Partition,
    P_y: Partition | None = None,
    P_w: Partition | None = None,
    *args: Any,
    **kwargs: Any,
) -> Module:
    """Return the 2-d convolution for these partitions: feature, channel or general."""
    return choose(2, _KINDS[2], P_x, P_y, P_w, args, kwargs)


def DistributedConv3d(
    P_x: Partition,
    P_y: Partition | None = None,
    P_w: Partition | None = None,
    *args: Any,
    **kwargs: Any,
) -> Module:
    """Return the 3-d convolution for these partitions: feature, channel or general."""
    return choose(3, _KINDS[3], P_x, P_y, P_w, args, kwargs)
