"""The arguments of a convolution, checked and spelled out for each spatial dim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import Literal, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from unisono.errors import PartitionError
from unisono.topology.window import PADDING_MODES, padding_pairs, per_dim

Overlap = Literal["auto"] | bool
Size = int | Sequence[int]
_KERNELS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


@dataclass(frozen=True)
class ConvSettings:
    """A convolution of the whole tensor."""

    in_channels: int
    out_channels: int
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int
    padding_mode: str

    @property
    def dims(self) -> int:
        """Number of spatial dims."""
        return len(self.kernel_size)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Shape of torch's weight."""
        return (self.out_channels, self.in_channels // self.groups, *self.kernel_size)

    def convolved(
        self,
        window: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *,
        groups: int | None = None,
        padding: tuple[int, ...] | None = None,
    ) -> Tensor:
        """Return the convolution of a window that holds its padding already, or all but zeros."""
        return _KERNELS[self.dims](
            window,
            weight,
            bias,
            stride=self.stride,
            padding=0 if padding is None else padding,
            dilation=self.dilation,
            groups=self.groups if groups is None else groups,
        )

    def gradients(
        self,
        dy: Tensor,
        window: Tensor,
        weight: Tensor,
        wanted: tuple[bool, bool, bool],
        padding: tuple[int, ...] | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of window, weight and bias that are wanted. Not differentiable."""
        none = (0,) * self.dims
        return torch.ops.aten.convolution_backward(
            dy, window, weight, [weight.shape[0]], self.stride,
            none if padding is None else padding, self.dilation, False, none, self.groups, wanted,
        )  # fmt: skip


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
    if padding_mode not in PADDING_MODES:
        raise PartitionError.because(
            f"{name}(padding_mode={padding_mode!r})",
            f"modes: {', '.join(map(repr, PADDING_MODES))}",
            None,
            'padding_mode="zeros"',
        )
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
        index(in_channels), index(out_channels), kernel, strides, pads, dilations, index(groups),
        padding_mode,
    )  # fmt: skip
