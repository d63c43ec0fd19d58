"""`DistributedConv1d/2d/3d`: convolutions split in space, batch and channels.

Split in space and batch, they call torch's function on a `Split`. Split in channels too, the input
lies on `P_x`, blocks of the weight on `P_w`, the output on `P_y`: each rank of `P_w` gets the
windows of its input channels, and sums over input channels meet on `P_y`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unisono.errors import PartitionError
from unisono.expect import expect, expect_choice
from unisono.nn.agreement import INPUTS, Cuts
from unisono.nn.layers.function_layer import FunctionLayer
from unisono.nn.layers.grid import GridLayer
from unisono.nn.module import Module
from unisono.nn.parameters import Weights, check_weights, nothing, whole
from unisono.nn.planned import PlannedModule, check_dims, check_sizes
from unisono.nn.split_tensors.convolution import KERNELS, TRANSPOSED, empty_output
from unisono.topology import Partition, halo
from unisono.topology.decompose import Interval, block
from unisono.topology.halo import HaloPlan
from unisono.topology.window import (
    PAD_MODES,
    PADDING_MODES,
    check_window,
    padding_pairs,
    per_dim,
    transposed_length,
)

Size = int | Sequence[int]


class _Conv(PlannedModule):
    """What all convolutions share: their numbers, as torch has them."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    dims: ClassVar[int]

    def _take_numbers(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size,
        padding: Size | str,
        padding_mode: str,
        dilation: Size,
        groups: int,
        weights: Weights,
    ) -> None:
        """Keep the numbers; refuse what torch would refuse."""
        self.kernel_size = per_dim(kernel_size, self.dims, "kernel_size")
        self.stride = per_dim(stride, self.dims, "stride")
        self.dilation = per_dim(dilation, self.dims, "dilation")
        expect_choice("padding_mode", padding_mode, PADDING_MODES, error=PartitionError)
        self.padding_mode = padding_mode
        for what, count in (("in_channels", in_channels), ("out_channels", out_channels)):
            if count < 1 or groups < 1 or count % groups:
                raise PartitionError.because(
                    f"{type(self).__name__}({what}={count}, groups={groups})",
                    "channels must be a positive multiple of groups",
                    f"{count} / {groups} = {count / groups:g}" if groups else None,
                    "groups=1",
                )
        self.in_channels, self.out_channels = map(operator.index, (in_channels, out_channels))
        self.groups = operator.index(groups)
        pairs: Any = padding
        self._pads = padding_pairs(pairs, self.kernel_size, self.stride, self.dilation)
        self._is_even = all(left == right for left, right in self._pads)
        as_torch = tuple(left for left, _ in self._pads) if self._is_even else self._pads
        self.padding = padding if isinstance(padding, str) else as_torch
        """As torch has it: a word, or one int a dim; pairs if the two sides of a dim differ."""
        self.weights: Weights = check_weights(weights)

    @property
    def stores_bias(self) -> bool:
        """Whether the bias is stored on this rank."""
        return "bias" in self._holdings and 0 not in self._holdings["bias"].shape

    @property
    def _numbers(self) -> list[tuple[int, int, int, int, int]]:
        """For each dim, kernel, stride, padding on both sides, dilation."""
        pads = zip(*self._pads, strict=True)
        return list(zip(self.kernel_size, self.stride, *pads, self.dilation, strict=True))


class _FeatureConv(FunctionLayer, _Conv):
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
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        weights: Weights = "replicated",
    ) -> None:
        super().__init__()
        if P_x.dim != self.dims + 2 or P_x.shape[1] != 1:
            raise PartitionError.because(
                f"{type(self).__name__} on {P_x!r}",
                f"{P_x.dim} dims, {P_x.shape[1] if P_x.dim > 1 else '?'} in channels",
                f"needs {self.dims + 2} dims with 1 in dim 1",
                f"Partition([1, 1, {', '.join(['2'] * self.dims)}])",
            )
        self.P_x = P_x
        self._take_numbers(
            in_channels, out_channels, kernel_size, stride, padding, padding_mode, dilation,
            groups, weights,
        )  # fmt: skip
        self.use_bias = bias
        hold = whole if P_x.active else nothing
        biases = hold((self.out_channels,)) if bias else None
        everywhere = P_x.size == P_x.root.size
        self._draw(
            hold(self._weight_shape), biases, everywhere=everywhere, dtype=dtype, device=device
        )

    @property
    def _weight_shape(self) -> tuple[int, ...]:
        return (self.out_channels, self.in_channels // self.groups, *self.kernel_size)

    @property
    def receives_bias(self) -> bool:
        """Whether this rank computes with the bias."""
        return self.use_bias and self.P_x.active

    def _users(self, name: str) -> Partition | None:  # noqa: ARG002
        return self.P_x if self.P_x.active else None

    def _check(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:  # noqa: ARG002
        check_sizes(type(self).__name__, [self.in_channels], [1], shape)
        for dim, (n, numbers) in enumerate(zip(shape[2:], self._numbers, strict=True), 2):
            check_window(n, *numbers, self.padding_mode, dim=dim)

    def forward(self, input: Tensor) -> Tensor:
        """Return this rank's balanced share of the convolution."""
        if not self._takes_part:
            return self._outside(input)
        weight, *bias = self._used("weight", "bias")
        # Gradients of parameters do not depend on what the backward sends.
        x = self._tied(input, least=INPUTS)
        return self._convolved(x, weight=weight, bias=bias[0] if bias else None)

    def _convolved(self, x: Tensor, **parameters: Tensor | None) -> Tensor:
        """Call torch's function."""
        padding: Any = self.padding
        options: dict[str, str] = {}
        if self.padding_mode != "zeros" or not self._is_even:
            if any(dim > 1 for dim in self._plan.cuts):  # one window with all that is outside
                padding, options = self._pads, {"padding_mode": self.padding_mode}
            else:
                widths = [n for pair in reversed(self._pads) for n in pair]
                mode = next(name for name, ours in PAD_MODES.items() if ours == self.padding_mode)
                x, padding = self._split_result(F.pad, x, widths, mode), 0
        return self._called(
            KERNELS[self.dims], x, **parameters, **options,
            stride=self.stride, padding=padding, dilation=self.dilation, groups=self.groups,
        )  # fmt: skip


class _FeatureConvTranspose(_FeatureConv):
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
        self.output_padding = per_dim(output_padding, self.dims, "output_padding")
        super().__init__(
            P_x, in_channels, out_channels, kernel_size, stride,
            per_dim(padding, self.dims, "padding"), "zeros", dilation, groups, bias,
            device=device, dtype=dtype, weights=weights,
        )  # fmt: skip

    @property
    def _weight_shape(self) -> tuple[int, ...]:
        return (self.in_channels, self.out_channels // self.groups, *self.kernel_size)

    def _check(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:  # noqa: ARG002
        check_sizes(type(self).__name__, [self.in_channels], [1], shape)
        ends = zip(shape[2:], self._numbers, self.output_padding, strict=True)
        for n, (kernel, stride, padding, _, dilation), more in ends:
            transposed_length(n, kernel, stride, padding, dilation, more)

    def _convolved(self, x: Tensor, **parameters: Tensor | None) -> Tensor:
        return self._called(
            TRANSPOSED[self.dims], x, **parameters, stride=self.stride, padding=self.padding,
            output_padding=self.output_padding, groups=self.groups, dilation=self.dilation,
        )  # fmt: skip


class _GeneralConv(GridLayer, _Conv):
    """A convolution whose channels are split too.

    With groups, `P_x` has one rank in channels, or as many as `P_y`, and groups are not cut.
    """

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
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        weights: Weights = "replicated",
    ) -> None:
        super().__init__()
        self._take_numbers(
            in_channels, out_channels, kernel_size, stride, padding, padding_mode, dilation,
            groups, weights,
        )  # fmt: skip
        for partition in (P_x, P_y):
            check_dims(type(self).__name__, partition, self.dims + 2, self.dims + 2)
        self._lay_out(P_x, P_y, P_w, 1, grouped=groups > 1)
        if groups > 1:
            self._check_groups()
        depth = self.in_channels // self.groups
        shape = (self.out_channels, depth, *self.kernel_size)
        self._make_parameters(shape, bias, dtype, device)

    def _check_groups(self) -> None:
        """Raise unless each rank has whole groups, of which it gets the inputs."""
        outs, ins = self.P_y.shape[1], self.P_x.shape[1]
        width = self.out_channels // self.groups
        for i in range(outs):
            start, stop = block(self.out_channels, outs, i)
            inputs = [n // width * (self.in_channels // self.groups) for n in (start, stop)]
            cut = start % width or stop % width
            if cut or (ins > 1 and inputs != list(block(self.in_channels, ins, i))):
                raise PartitionError.because(
                    f"{type(self).__name__}(groups={self.groups}) on {self.P_x!r} and {self.P_y!r}",
                    f"output channels {start} to {stop} on one rank, groups of {width}",
                    "not whole groups, or not their inputs",
                    f"a number of ranks in channels that divides {self.groups}",
                )

    def _blocks(self, index: Sequence[int]) -> tuple[Interval, Interval]:
        outs = block(self.out_channels, self._grid.shape[1], index[1])
        return outs, block(self.in_channels // self.groups, self._grid.shape[2], index[2])

    def _check(self, shape: Sequence[int]) -> None:
        check_sizes(type(self).__name__, [self.in_channels], [1], shape)

    def _window_at(self, cuts: Cuts, index: Sequence[int]) -> HaloPlan:
        return halo.plan(
            cuts, index, self.kernel_size, self.stride, self._pads, self.dilation,
            self.padding_mode,
        )  # fmt: skip

    def _product(
        self, window: Tensor, weight: Tensor, bias: Tensor | None, shape: tuple[int, ...]
    ) -> Tensor:
        if 0 in shape or 0 in weight.shape:
            y = empty_output(window, weight, shape)
            return y if bias is None else y + bias.reshape(1, -1, *(1,) * self.dims)
        groups = 1
        if self.groups > 1 and self._index is not None:
            width = self.out_channels // self.groups
            groups, first = len(weight) // width, self._blocks(self._index)[0][0] // width
            if self.P_x.shape[1] == 1:  # it has come with all channels
                depth = weight.shape[1]
                window = window.narrow(1, first * depth, groups * depth)
        return KERNELS[self.dims](window, weight, bias, self.stride, 0, self.dilation, groups)


class DistributedFeatureConv1d(_FeatureConv):
    """`torch.nn.Conv1d` of a tensor `(N, C, L)` split in N and L."""

    dims = 1


class DistributedFeatureConv2d(_FeatureConv):
    """`torch.nn.Conv2d` of a tensor `(N, C, H, W)` split in N, H and W."""

    dims = 2


class DistributedFeatureConv3d(_FeatureConv):
    """`torch.nn.Conv3d` of a tensor `(N, C, D, H, W)` split in N, D, H and W."""

    dims = 3


class DistributedFeatureConvTranspose1d(_FeatureConvTranspose):
    """`torch.nn.ConvTranspose1d` of a tensor `(N, C, L)` split in N and L."""

    dims = 1


class DistributedFeatureConvTranspose2d(_FeatureConvTranspose):
    """`torch.nn.ConvTranspose2d` of a tensor `(N, C, H, W)` split in N, H and W."""

    dims = 2


class DistributedFeatureConvTranspose3d(_FeatureConvTranspose):
    """`torch.nn.ConvTranspose3d` of a tensor `(N, C, D, H, W)` split in N, D, H and W."""

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


def _selector(dims: int) -> Callable[..., Module]:
    def conv(
        P_x: Partition,
        P_y: Partition | None = None,
        P_w: Partition | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Module:
        return choose(dims, _KINDS[dims], P_x, P_y, P_w, args, kwargs)

    conv.__name__ = conv.__qualname__ = f"DistributedConv{dims}d"
    conv.__doc__ = (
        f"Return the {dims}-d convolution for these partitions: feature, channel or general."
    )
    return conv


DistributedConv1d, DistributedConv2d, DistributedConv3d = map(_selector, (1, 2, 3))
