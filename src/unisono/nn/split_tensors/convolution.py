"""A convolution split in space, as one autograd function: own block in, own share out.

A window with halos is filled and convolved. The backward fills it anew from the block and what had
arrived, so no window is kept. Dims that are not cut are left to torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from unisono.comm import Communicator
from unisono.nn.agreement import Cuts
from unisono.nn.precision import is_plain
from unisono.operators.halo import HaloAddMap, HaloExchangeMap, HaloOnGroup, exchanged, filled
from unisono.operators.linear import slopes
from unisono.topology import halo
from unisono.topology.decompose import block, split_cuts
from unisono.topology.halo import Axis, plan_windows
from unisono.topology.window import (
    copied,
    output_length,
    transposed_cover,
    transposed_length,
    transposed_window,
)

KERNELS: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED: dict[int, Callable[..., Tensor]] = {
    1: F.conv_transpose1d,
    2: F.conv_transpose2d,
    3: F.conv_transpose3d,
}


@dataclass(frozen=True)
class SpacePlan:
    """How one rank convolves its share in space."""

    exchange: HaloOnGroup
    shape: tuple[int, ...]
    """Of the own share."""
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    """Zeros that the window does not hold, on both sides of each dim in space. Of a transposed
    convolution, outputs that torch's kernel leaves out."""
    dilation: tuple[int, ...]
    groups: int
    output_padding: tuple[int, ...] | None = None
    """Of a transposed convolution; None: it is none."""
    crops: tuple[tuple[int, int], ...] = ()
    """Of a transposed convolution, for each dim in space, points to add (or, negative, to cut)
    before and after what the window reaches."""

    @cached_property
    def is_void(self) -> bool:
        """Whether there is nothing to convolve: no outputs, or no input that reaches them."""
        return 0 in self.shape or 0 in self.exchange.halo.window_shape

    @cached_property
    def extends(self) -> bool:
        """Whether the share may have points that no input reaches: the bias alone stands there."""
        return self.is_void or any(n > 0 for crop in self.crops for n in crop)

    def convolved(self, window: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the convolution of a window, from operations that autograd differentiates."""
        if self.is_void:
            return empty_output(window, weight, self.shape)
        dims, numbers = len(self.stride), (self.stride, self.padding)
        if self.output_padding is None:
            return KERNELS[dims](window, weight, bias, *numbers, self.dilation, self.groups)
        rest = self.output_padding, self.groups, self.dilation
        return TRANSPOSED[dims](window, weight, bias, *numbers, *rest)

    def gradients(
        self, dy: Tensor, window: Tensor, weight: Tensor, needed: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of window, weight and bias that are needed. Not differentiable."""
        if self.is_void:
            zeros = torch.zeros_like(window), torch.zeros_like(weight), dy.new_zeros(dy.shape[1])
        else:
            more = self.output_padding
            zeros = torch.ops.aten.convolution_backward(
                dy, window, weight, [dy.shape[1]], self.stride, self.padding, self.dilation,
                more is not None, more or (0,) * len(self.stride), self.groups, list(needed),
            )  # fmt: skip
        dwindow, dw, db = (g if n else None for g, n in zip(zeros, needed, strict=True))
        return dwindow, dw, db

    def cropped(self, y: Tensor) -> Tensor:
        """Return the own share of what the window reaches; zeros where nothing does."""
        for dim, (before, after) in enumerate(self.crops, 2):
            if before < 0 or after < 0:
                length = y.shape[dim] + min(before, 0) + min(after, 0)
                y = y.narrow(dim, max(-before, 0), length)
        if self.extends:
            y = F.pad(y, [max(n, 0) for crop in reversed(self.crops) for n in crop])
        return y


def space_plan(
    cuts: Cuts,
    index: Sequence[int],
    comm: Communicator,
    ranks: tuple[int, ...] | None,
    weight: Sequence[int],
    stride: tuple[int, ...],
    padding: Sequence[tuple[int, int]],
    dilation: tuple[int, ...],
    groups: int,
    padding_mode: str = "zeros",
) -> SpacePlan:
    """Return the plan of the rank at `index`.

    Args:
        cuts: of the input, batch and channels first.
        index: own place in each dim.
        comm: the ranks.
        ranks: rank of `comm` for each rank of the grid of cuts; None: the same.
        weight: shape of the weight.
        stride: one number for each dim in space; likewise `(left, right)` padding and `dilation`.
        groups: of the channels.
        padding_mode: what stands outside.
    """
    kernel, dims = weight[2:], range(len(stride))
    # The window brings the padding of cut dims; along the others torch adds its zeros itself.
    is_torchs = [low == high and (padding_mode == "zeros" or not low) for low, high in padding]
    is_read = [len(cuts[2 + i]) > 2 or not is_torchs[i] for i in dims]
    window = halo.plan(
        cuts,
        index,
        [kernel[i] if is_read[i] else 1 for i in dims],
        [stride[i] if is_read[i] else 1 for i in dims],
        [padding[i] if is_read[i] else (0, 0) for i in dims],
        [dilation[i] if is_read[i] else 1 for i in dims],
        padding_mode,
    )
    shape = [
        n if is_read[i] else output_length(n, kernel[i], stride[i], padding[i], dilation[i])
        for i, n in enumerate(window.output_shape[2:])
    ]
    left = tuple(0 if is_read[i] else padding[i][0] for i in dims)
    exchange = HaloOnGroup(comm, window, ranks, 0.0)
    whole = (window.output_shape[0], weight[0], *shape)
    return SpacePlan(exchange, whole, stride, left, dilation, groups)


def transposed_plan(
    cuts: Cuts,
    index: Sequence[int],
    comm: Communicator,
    ranks: tuple[int, ...] | None,
    weight: Sequence[int],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
    output_padding: tuple[int, ...],
) -> SpacePlan:
    """Return the plan of a transposed convolution; arguments as for `space_plan`."""
    axes = [Axis(split_cuts(own[-1], len(own) - 1), copied) for own in cuts[:2]]
    pads, more = list(padding), list(output_padding)
    crops: list[tuple[int, int]] = []
    for i, own in enumerate(cuts[2:]):
        x, parts = own[-1], len(own) - 1
        k, s, d = weight[2 + i], stride[i], dilation[i]
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
    window = plan_windows(cuts, index, axes)
    batch, _, *space = window.output_shape
    return SpacePlan(
        HaloOnGroup(comm, window, ranks, 0.0), (batch, weight[1] * groups, *space), stride,
        tuple(pads), dilation, groups, tuple(more), tuple(crops),
    )  # fmt: skip


class ConvInSpace(torch.autograd.Function):
    """Own block, parameters -> own share of the output, where windows are not blocks."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: SpacePlan
    ) -> Tensor:
        """Convolve the window."""
        received = exchanged(x, plan.exchange)
        # Not the window: it would be the activation once more.
        ctx.plan, ctx.peers = plan, tuple(received)
        ctx.save_for_backward(x, weight, bias, *received.values())
        return plan.convolved(filled(x, plan.exchange, received), weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of own block, weight and bias."""
        plan: SpacePlan = ctx.plan
        x, weight, bias, *values = ctx.saved_tensors
        received, needed = dict(zip(ctx.peers, values, strict=True)), ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():

            def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
                # The window is made anew from what arrived before; its backward sends as ever.
                window = HaloExchangeMap.apply(x, replace(plan.exchange, landed=received))
                return plan.convolved(window, weight, bias)

            return *slopes(forward, (x, weight, bias), needed, grads[0]), None
        window = filled(x, plan.exchange, received)
        dwindow, dw, db = plan.gradients(grads[0], window, weight, needed)
        dx = None if dwindow is None else HaloAddMap.kernel(dwindow, plan.exchange)
        return dx, dw, db, None


# What `Function.apply` ends in when no transform of torch.func is active; see `LinearMap`.
_recorded: Any = super(torch.autograd.Function, ConvInSpace).apply  # type: ignore[misc]


def convolved_in_space(x: Tensor, weight: Tensor, bias: Tensor | None, plan: SpacePlan) -> Tensor:
    """Return the own share of a convolution of the own block."""
    inside = None if plan.extends else bias
    if plan.exchange.halo.is_identity:  # the window is the block: torch's own is fastest
        y = plan.convolved(x, weight, inside)
    elif not is_plain(x):
        y = plan.convolved(HaloExchangeMap.apply(x, plan.exchange), weight, inside)
    elif torch.is_grad_enabled():
        y = _recorded(x, weight, inside, plan)
    else:
        window = filled(x, plan.exchange, exchanged(x, plan.exchange))
        y = plan.convolved(window, weight, inside)
    if plan.crops and not plan.is_void:
        y = plan.cropped(y)
    if inside is bias or bias is None:
        return y
    return y + bias.to(y.dtype).view(-1, *[1] * len(plan.stride))


def empty_output(window: Tensor, weight: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a share of zeros that runs the backwards which other ranks' shares run.

    As with a convolution, every gradient depends on window and weight: second derivatives send
    what they send elsewhere.
    """
    return ((window.sum() + weight.sum()).square() * 0).expand(shape)
