"""Convolutions split in channels too: windows to every rank that needs them, partial sums back.

Input on `P_x`, weight blocks on `P_w`, output on `P_y`. Each rank of `P_w` convolves the window of
its input channels with its block of the weight; sums over input channels meet on `P_y`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.comm import Communicator
from unisono.errors import PartitionError
from unisono.nn.autocast import collect_products
from unisono.nn.conv_base import ConvBase
from unisono.nn.conv_grid import Channels, channels_at, fetch_plan, runs_of, weight_grid
from unisono.nn.conv_overlap import SpacePlan, empty_output
from unisono.nn.conv_settings import Overlap, Size
from unisono.nn.parameters import (
    Holding,
    Weights,
    draw_weight_and_bias,
    nothing,
    replicated_or_root,
)
from unisono.nn.structure import Table
from unisono.operators.halo import HaloExchange, HaloOnGroup
from unisono.operators.partitioned import FanPlan, fan_plan, spread
from unisono.topology import Partition
from unisono.topology.fanout import broadcast_groups, reduce_groups
from unisono.topology.halo import HaloPlan

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


class _GeneralConv(ConvBase[_GeneralPlan | SpacePlan]):
    """Where only space and batch are split, its plan is that of the spatial convolution."""

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
        self.P_x, self.P_y, self.P_w = P_x, P_y, P_w
        self._settle(
            in_channels, out_channels, kernel_size, stride, padding, padding_mode, dilation,
            groups, bias, overlap, weights,
        )  # fmt: skip
        self._grid = weight_grid(type(self).__name__, self.dims, P_x, P_y, P_w, groups)
        self._is_spatial = (
            P_x.ranks == P_y.ranks == P_w.ranks and self._grid.shape[1] == P_x.shape[1] == 1
        )
        self._index = self._own_index()
        weight, own_bias = self._own_blocks()
        self.stores_bias = own_bias is not None and 0 not in own_bias.shape
        self.receives_bias = bias and self._index is not None and self._index[2] == 0
        drawn = draw_weight_and_bias(self._control(), weight, own_bias, dtype=dtype, device=device)
        self.weight, self.bias = drawn
        self._hold("weight", weight, replicated=False)
        if own_bias is not None:
            self._hold("bias", own_bias, replicated=False)

    def _own_index(self) -> tuple[int, ...] | None:
        """Return the own place in the grid: batch, output channels, input channels, space."""
        if not self.P_w.active:
            return None
        return self._grid.index_of(self._grid.ranks.index(self.P_w.root.rank))

    def _own_channels(self) -> Channels:
        if self._index is None:  # only ranks of the weight's partition come here
            raise PartitionError(f"{self.P_w!r} has no place for this rank")
        return channels_at(self.settings, self._grid, self._index)

    def _own_blocks(self) -> tuple[Holding, Holding | None]:
        """Return which blocks of weight and bias this rank holds."""
        shape, index = self.settings.weight_shape, self._index
        own, own_bias = nothing(shape), nothing(shape[:1])
        if index is not None and (
            self.weights == "replicated" or all(i == 0 for i in (index[0], *index[3:]))
        ):
            held = self._own_channels()
            (c0, c1), (k0, k1) = held.outs, held.depth
            sizes = (c1 - c0, k1 - k0, *self.settings.kernel_size)
            own = Holding(shape, (c0, k0, *(0,) * self.dims), sizes)
            if index[2] == 0:
                own_bias = Holding(shape[:1], (c0,), (c1 - c0,))
        return own, own_bias if self.use_bias else None

    def _describe(self) -> tuple[object, ...]:
        return (self.P_x, self.P_y, self.P_w, self.settings, self.use_bias, self.weights)

    def _make_plan(self, tables: Sequence[Table]) -> _GeneralPlan | SpacePlan:
        (table,) = tables
        dtype = table.dtype(self.P_x)
        cuts = table.cuts(self.P_x)
        self._check_channels(cuts)
        if self._is_spatial and self.P_x.index is not None:
            return self._space_plan(self._halo_at(cuts, self.P_x.index), self.P_x.ranks)
        root = self.P_x.root
        batch, outs, _ins, *space = self._grid.shape
        few_x = self.P_x.reshape((batch, 1, self.P_x.shape[1], *space))
        few_y = self.P_y.reshape((batch, outs, 1, *space))
        windows = {
            rank: self._halo_at(cuts, self.P_x.index_of(place))
            for place, rank in enumerate(self.P_x.ranks)
        }
        mine = table.of(root.rank).shape
        fetch, to_weights = None, None
        if self.settings.groups > 1:
            fetch = fetch_plan(self.settings, self._grid, self.P_x, windows, mine)
        else:
            groups = broadcast_groups(few_x, self._grid)
            shapes = [windows[group.root].window_shape for group in groups]
            to_weights = fan_plan(groups, root, shapes, dtype)
        partials = {
            rank: self._partial_shape(windows, place) for place, rank in enumerate(self._grid.ranks)
        }
        sums = reduce_groups(self._grid, few_y)
        to_outputs = fan_plan(
            sums,
            root,
            [partials[group.peers[0]] for group in sums],
            dtype,
            empty=(mine[0], 0) if mine else (0,),
        )
        return _GeneralPlan(
            windows.get(root.rank), to_weights, fetch, to_outputs, partials.get(root.rank, (0,))
        )

    def _partial_shape(self, windows: dict[int, HaloPlan], place: int) -> tuple[int, ...]:
        index = self._grid.index_of(place)
        source = self.P_x.rank_at((index[0], 0, *index[3:]))
        share = windows[self.P_x.ranks[source]].output_shape
        c0, c1 = channels_at(self.settings, self._grid, index).outs
        return (share[0], c1 - c0, *share[2:])

    def _gradient_comm(self, name: str) -> Communicator | None:  # noqa: ARG002
        if self._index is None or self.weights != "replicated":
            return None
        return self._replicas().comm

    def _replicas(self) -> Partition:
        """Return the ranks that use this rank's weight block."""
        axes = (0, *range(3, self._grid.dim))
        return self._grid.sub(axes, rank=self._grid.ranks.index(self.P_w.root.rank))

    def _parameters_here(self) -> tuple[Tensor, Tensor | None]:
        own = self._own_channels()
        (c0, c1), (k0, k1) = own.outs, own.depth
        held = [self.weight]
        shapes: list[tuple[int, ...]] = [(c1 - c0, k1 - k0, *self.settings.kernel_size)]
        if self.bias is not None and self.receives_bias:
            held.append(self.bias)
            shapes.append((c1 - c0,))
        w, *b = replicated_or_root(
            self._replicas(), self.weights, shapes, held, sums=self._sums_gradients
        )
        return w, b[0] if b else None

    def _halo(self) -> HaloOnGroup | None:
        plan = self._plan
        window = plan.exchange.halo if isinstance(plan, SpacePlan) else plan.window
        return None if window is None else self._on_ranks(window, self.P_x.ranks)

    def forward(self, input: Tensor) -> Tensor:
        """Return this rank's balanced share of the convolution on `P_y`."""
        if not self._takes_part:
            return self._outside(input)
        if self._is_spatial:
            return self._in_space(input, *self._parameters_here())
        held = self._window(input)
        plan = self._general()
        if plan.to_weights is not None:
            held = spread(held, plan.to_weights)
        elif plan.fetch is not None:
            if held.numel() == 0:  # a rank without a block may not know the dtype of the data
                held = held.to(plan.to_outputs.dtype)
            held = HaloExchange.apply(held, HaloOnGroup(self.P_x.root, plan.fetch, None, 0.0))
        if self.P_w.active:
            held = self._convolved(held)
        return collect_products(held, plan.to_outputs)

    def _space(self) -> SpacePlan:
        return self._plan if isinstance(self._plan, SpacePlan) else super()._space()

    def _general(self) -> _GeneralPlan:
        if isinstance(self._plan, SpacePlan):
            raise PartitionError(f"{type(self).__name__} is split in space alone")
        return self._plan

    def _convolved(self, window: Tensor) -> Tensor:
        """Convolve with the own weight block; groups that a rank border cuts, one by one."""
        weight, bias = self._parameters_here()
        shape = self._general().partial_shape
        if 0 in shape or 0 in weight.shape:
            y = empty_output(window, weight, bias, shape)
            return y if bias is None else y + bias.reshape(1, -1, *(1,) * self.dims)
        if self.settings.groups == 1:
            return self.settings.convolved(window, weight, bias)
        parts: list[Tensor] = []
        for run in runs_of(self.settings, self._own_channels()):
            rows = slice(*run.outs)
            part = window.narrow(1, run.ins[0], run.ins[1] - run.ins[0])
            own = None if bias is None else bias[rows]
            parts.append(self.settings.convolved(part, weight[rows], own, groups=run.groups))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


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
