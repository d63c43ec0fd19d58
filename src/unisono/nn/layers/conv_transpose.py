"""Transposed convolutions split in space and batch: inputs from neighbours, no sums to send."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from unisono.errors import PartitionError
from unisono.nn.agreement import Cuts, Table
from unisono.nn.layers.conv_space import (
    ConvSettings,
    Size,
    check_channels,
    check_space,
    empty_output,
)
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


@dataclass(frozen=True)
class TransposePlan:
    """How one rank makes its share: a window, what it reaches, and what is cut off of that."""

    halo: HaloPlan
    settings: ConvSettings
    padding: tuple[int, ...]
    """Outputs that torch's kernel leaves out, before and after."""
    crops: tuple[tuple[int, int], ...]
    """For each spatial dim, points to add (or, negative, to cut) before and after."""

    def share(self, y: Tensor) -> Tensor:
        """Return the own share of what the window reaches; zeros where nothing does."""
        for dim, (before, after) in enumerate(self.crops, 2):
            if before < 0 or after < 0:
                length = y.shape[dim] + min(before, 0) + min(after, 0)
                y = y.narrow(dim, max(-before, 0), length)
        if self.extends:
            y = F.pad(y, [max(n, 0) for crop in reversed(self.crops) for n in crop])
        return y

    @cached_property
    def extends(self) -> bool:
        """Whether the share has points that no input reaches: the bias alone stands there."""
        return any(n > 0 for crop in self.crops for n in crop)


def transposed_plan(settings: ConvSettings, cuts: Cuts, index: Sequence[int]) -> TransposePlan:
    """Return the plan of the rank at `index`, given the settings of the whole."""
    axes = [Axis(split_cuts(own[-1], len(own) - 1), copied) for own in cuts[:2]]
    pads = [low for low, _ in settings.padding]
    more = list(settings.output_padding or [0] * settings.dims)
    crops: list[tuple[int, int]] = []
    for i, own in enumerate(cuts[2:]):
        x, parts = own[-1], len(own) - 1
        k, s, d = settings.kernel_size[i], settings.stride[i], settings.dilation[i]
        y = transposed_length(x, k, s, pads[i], d, more[i])
        if parts == 1:  # nothing is cut here: torch does it
            axes.append(Axis((0, y), lambda _, __, x=x: copied(0, x)))
            crops.append((0, 0))
            continue
        reads = partial(transposed_window, x=x, k=k, s=s, p=pads[i], d=d)
        axes.append(Axis(split_cuts(y, parts), reads))
        y0, y1 = block(y, parts, index[i + 2])
        needed = reads(y0, y1)
        c0, c1 = transposed_cover(needed[0].source if needed else (0, 0), k, s, pads[i], d)
        low, high = (y0 - c0, c1 - y1) if needed else (0, y0 - y1)
        # The kernel leaves out as much on both sides, and may go on a little at the end: to the
        # end of the share, or to a multiple of the stride, for which it is twice as fast.
        pads[i] = max(0, min(low, high))
        more[i] = -(c1 - c0 - 2 * pads[i]) % s
        if low >= 0 and 0 <= low - high < max(s, d):
            pads[i], more[i] = low, low - high
        crops.append((pads[i] - low, pads[i] - more[i] - high))
    local = replace(settings, output_padding=tuple(more))
    return TransposePlan(plan_windows(cuts, index, axes), local, tuple(pads), tuple(crops))


class _FeatureConvTranspose(HoldingModule[TransposePlan]):
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

    def _make_plan(self, tables: Sequence[Table]) -> TransposePlan:
        (table,) = tables
        table.dtype(self.P_x)
        cuts = table.cuts(self.P_x)
        check_channels(type(self).__name__, self.in_channels, cuts)
        settings = ConvSettings(
            self.in_channels, self.out_channels, self.kernel_size, self.stride,
            tuple((n, n) for n in self.padding), self.dilation, self.groups, "zeros",
            self.output_padding,
        )  # fmt: skip
        return transposed_plan(settings, cuts, index_in(self.P_x))

    def forward(self, input: Tensor) -> Tensor:
        """Return this rank's balanced share of the transposed convolution."""
        if not self._takes_part:
            return self._outside(input)
        weight, *bias = self._used(("weight", "bias"), self._shapes)
        window, plan = self._window(input), self._plan
        batch, _, *space = plan.halo.output_shape
        shape = (batch, self.out_channels, *space)
        if 0 in plan.halo.window_shape or 0 in shape:
            y = empty_output(window, weight, None, shape)
        else:
            own = bias[0] if bias and not plan.extends else None
            y = plan.share(plan.settings.convolved(window, weight, own, padding=plan.padding))
            bias = bias if own is None else []
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
