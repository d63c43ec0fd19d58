"""Transposed convolutions split in space and batch: inputs from neighbours, no sums to send."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from unisono.errors import PartitionError
from unisono.nn.agreement import Table
from unisono.nn.layers.conv_space import Size, check_channels, check_space, empty_output
from unisono.nn.parameters import Weights, check_weights
from unisono.nn.planned import index_in
from unisono.nn.state import HoldingModule
from unisono.topology import Partition
from unisono.topology.decompose import block, split_cuts
from unisono.topology.halo import Axis, HaloPlan, plan_windows
from unisono.topology.window import (
    copied,
    per_dim,
    transposed_cover,
    transposed_length,
    transposed_window,
)

_KERNELS = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


@dataclass(frozen=True)
class _TransposePlan:
    halo: HaloPlan
    crops: tuple[tuple[int, int], ...]
    """For each spatial dim, points to add (or, negative, to cut) before and after."""


class _FeatureConvTranspose(HoldingModule[_TransposePlan]):
    dims: ClassVar[int]
    padding_mode: ClassVar[str] = "zeros"
    """The one that torch has, too."""

    def __init__(
        self,
        P_x: Partition,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size = 0,
        output_padding: Size = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Size = 1,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        weights: Weights = "replicated",
    ) -> None:
        super().__init__()
        name = type(self).__name__
        check_space(name, P_x, self.dims)
        if groups < 1 or in_channels % groups or out_channels % groups:
            raise PartitionError.because(
                f"{name}({in_channels}, {out_channels}, groups={groups})",
                "channels must be multiples of groups",
                None,
                "groups=1",
            )
        self.P_x = P_x
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_size = per_dim(kernel_size, self.dims, "kernel_size")
        self.stride = per_dim(stride, self.dims, "stride")
        self.padding = per_dim(padding, self.dims, "padding")
        self.output_padding = per_dim(output_padding, self.dims, "output_padding")
        self.dilation = per_dim(dilation, self.dims, "dilation")
        self.groups = groups
        self.weights: Weights = check_weights(weights)
        self.use_bias = bias
        self._shapes = (in_channels, out_channels // groups, *self.kernel_size), (out_channels,)
        weight, own_bias = self._shapes
        self._draw_whole(P_x, weight, own_bias if bias else None, dtype=dtype, device=device)

    def _users(self, name: str) -> Partition | None:  # noqa: ARG002
        return self.P_x if self.P_x.active else None

    def _make_plan(self, tables: Sequence[Table]) -> _TransposePlan:
        (table,) = tables
        table.dtype(self.P_x)
        cuts = table.cuts(self.P_x)
        index = index_in(self.P_x)
        check_channels(type(self).__name__, self.in_channels, cuts)
        axes = [Axis(split_cuts(cuts[d][-1], self.P_x.shape[d]), copied) for d in (0, 1)]
        crops: list[tuple[int, int]] = []
        for i in range(self.dims):
            x, parts = cuts[i + 2][-1], self.P_x.shape[i + 2]
            k, s, p, d = self.kernel_size[i], self.stride[i], self.padding[i], self.dilation[i]
            y = transposed_length(x, k, s, p, d, self.output_padding[i])
            reads = partial(transposed_window, x=x, k=k, s=s, p=p, d=d)
            axes.append(Axis(split_cuts(y, parts), reads))
            y0, y1 = block(y, parts, index[i + 2])
            needed = reads(y0, y1)
            c0, c1 = transposed_cover(needed[0].source if needed else (0, 0), k, s, p, d)
            crops.append((c0 - y0, y1 - c1) if needed else (0, y1 - y0))
        return _TransposePlan(plan_windows(cuts, index, axes), tuple(crops))

    def forward(self, input: Tensor) -> Tensor:
        """Return this rank's balanced share of the transposed convolution."""
        if not self._takes_part:
            return self._outside(input)
        weight, *bias = self._used(("weight", "bias"), self._shapes)
        window = self._window(input)
        plan = self._plan.halo
        batch, _, *space = plan.output_shape
        shape = (batch, self.out_channels, *space)
        if 0 in plan.window_shape or 0 in shape:
            y = empty_output(window, weight, None, shape)
        else:
            y = _KERNELS[self.dims](
                window, weight, None, stride=self.stride, groups=self.groups,
                dilation=self.dilation,
            )  # fmt: skip
            pads = [n for crop in reversed(self._plan.crops) for n in crop]
            y = F.pad(y, pads) if any(pads) else y
        return y + bias[0].to(y.dtype).reshape(1, -1, *(1,) * self.dims) if bias else y


class DistributedFeatureConvTranspose1d(_FeatureConvTranspose):
    """`torch.nn.ConvTranspose1d` of a tensor `(N, C, L)` split in N and L."""

    dims = 1


class DistributedFeatureConvTranspose2d(_FeatureConvTranspose):
    """`torch.nn.ConvTranspose2d` of a tensor `(N, C, H, W)` split in N, H and W."""

    dims = 2


class DistributedFeatureConvTranspose3d(_FeatureConvTranspose):
    """`torch.nn.ConvTranspose3d` of a tensor `(N, C, D, H, W)` split in N, D, H and W."""

    dims = 3
