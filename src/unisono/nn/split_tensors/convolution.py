"""A convolution split in space, as one autograd function: own block in, own share out.

With a cover, the own block is convolved while messages travel, and patches add what they bring; in
the backward the gradients of other ranks' points are sent first, and the own are computed while
they travel. Without one, a window with padding and halos is filled and convolved whole. Which way a
rank goes is its own affair: messages and graph are the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from unisono.comm import Communicator
from unisono.comm.perform import Pending
from unisono.nn.agreement import Cuts
from unisono.nn.precision import is_plain
from unisono.operators.halo import (
    HaloAddMap,
    HaloExchangeMap,
    HaloOnGroup,
    arrived,
    exchanged,
    filled,
    gathered,
    joined,
    place,
    post,
    start_exchange,
)
from unisono.operators.linear import slopes
from unisono.topology.cover import Cover, Patch, cover
from unisono.topology.decompose import block, split_cuts
from unisono.topology.halo import Axis, Box, plan_windows
from unisono.topology.window import (
    copied,
    transposed_cover,
    transposed_length,
    transposed_window,
)

Overlap = Literal["auto"] | bool
MOST_PATCHED = 1 / 16
"""With `overlap="auto"`, patches may give at most this share of the outputs, ..."""
LEAST_WORK = 1 << 26
"""... and the convolution must have this many multiplications."""
_KERNELS: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED: dict[int, Callable[..., Tensor]] = {
    1: F.conv_transpose1d,
    2: F.conv_transpose2d,
    3: F.conv_transpose3d,
}


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
    output_padding: tuple[int, ...] | None = None
    """Of a transposed convolution; None: it is none."""

    @property
    def dims(self) -> int:
        """Number of spatial dims."""
        return len(self.kernel_size)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Shape of torch's weight."""
        if self.output_padding is not None:
            return (self.in_channels, self.out_channels // self.groups, *self.kernel_size)
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
        """Return the convolution of a window that holds its padding already, or all but zeros.

        `padding` are those zeros; of a transposed convolution, outputs that are left out.
        """
        around = 0 if padding is None else padding
        groups = self.groups if groups is None else groups
        if self.output_padding is None:
            conv = _KERNELS[self.dims]
            return conv(window, weight, bias, self.stride, around, self.dilation, groups)
        conv = _TRANSPOSED[self.dims]
        more = self.output_padding
        return conv(window, weight, bias, self.stride, around, more, groups, self.dilation)

    def gradients(
        self,
        dy: Tensor,
        window: Tensor,
        weight: Tensor,
        needs: tuple[bool, bool, bool],
        padding: tuple[int, ...] | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of window, weight and bias that are needed. Not differentiable."""
        none = (0,) * self.dims
        return torch.ops.aten.convolution_backward(
            dy, window, weight, [dy.shape[1]], self.stride, none if padding is None else padding,
            self.dilation, self.output_padding is not None, self.output_padding or none,
            self.groups, needs,
        )  # fmt: skip


Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Of own block, weight and bias."""


@dataclass(frozen=True)
class SpacePlan:
    """How one rank convolves its share in space."""

    settings: ConvSettings
    exchange: HaloOnGroup
    cover: Cover | None = None
    """The pass over the own block and its patches; None: all of it from a window."""
    padding: tuple[int, ...] | None = None
    """Zeros that the window does not hold, on both sides of each dim; None: it holds them all.
    Of a transposed convolution, outputs that torch's kernel leaves out."""
    crops: tuple[tuple[int, int], ...] = ()
    """Of a transposed convolution, for each dim in space, points to add (or, negative, to cut)
    before and after what the window reaches."""

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of the own share."""
        batch, _, *space = self.exchange.halo.output_shape
        return (batch, self.settings.out_channels, *space)

    @cached_property
    def is_void(self) -> bool:
        """Whether there is nothing to convolve: no outputs, or no input that reaches them."""
        return 0 in self.shape or 0 in self.exchange.halo.window_shape

    @cached_property
    def extends(self) -> bool:
        """Whether the share may have points that no input reaches: the bias alone stands there."""
        return self.is_void or any(n > 0 for crop in self.crops for n in crop)

    def cropped(self, y: Tensor) -> Tensor:
        """Return the own share of what the window reaches; zeros where nothing does."""
        for dim, (before, after) in enumerate(self.crops, 2):
            if before < 0 or after < 0:
                length = y.shape[dim] + min(before, 0) + min(after, 0)
                y = y.narrow(dim, max(-before, 0), length)
        if self.extends:
            y = F.pad(y, [max(n, 0) for crop in reversed(self.crops) for n in crop])
        return y

    def of_window(self, window: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the convolution of a window, from operations that autograd differentiates."""
        if self.is_void:
            return empty_output(window, weight, self.shape)
        return self.settings.convolved(window, weight, bias, padding=self.padding)


def space_plan(settings: ConvSettings, exchange: HaloOnGroup, overlap: Overlap) -> SpacePlan:
    """Return how the share of a rank is convolved: over the own block and patches, or a window.

    By the rule of "auto": without patches the pass over the own block saves the window and costs
    nothing. With them it must be worth it: the window's copy saved and the wait hidden, against a
    few small convolutions more.
    """
    s, halo = settings, exchange.halo
    covered = cover(halo, s.kernel_size, s.stride, s.dilation, s.padding) if overlap else None
    if covered is not None and covered.patches and overlap == "auto":
        taps = math.prod(s.kernel_size) * s.out_channels // s.groups
        is_large = math.prod(halo.output_shape) * taps >= LEAST_WORK
        overlap = is_large and covered.patched_share <= MOST_PATCHED
    if covered is not None and overlap:
        return SpacePlan(settings, exchange, covered)
    if exchange.fill != 0:
        return SpacePlan(settings, exchange)
    # Zeros that torch's kernel can add itself are not written into the window.
    trimmed, zeros = halo.without_margins()
    return SpacePlan(settings, replace(exchange, halo=trimmed), None, zeros[2:] or None)


def transposed_plan(
    settings: ConvSettings,
    cuts: Cuts,
    index: Sequence[int],
    comm: Communicator,
    ranks: tuple[int, ...] | None,
) -> SpacePlan:
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
    exchange = HaloOnGroup(comm, plan_windows(cuts, index, axes), ranks, 0.0)
    local = replace(settings, output_padding=tuple(more))
    return SpacePlan(local, exchange, None, tuple(pads), tuple(crops))


class ConvInSpace(torch.autograd.Function):
    """Own block, parameters -> own share of the output, where windows are not blocks."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: SpacePlan
    ) -> Tensor:
        """Convolve the own block while messages travel, or all of the window after them."""
        y, received = _convolved(x, weight, bias, plan)
        # Not the window: it would be the activation once more.
        ctx.plan, ctx.peers = plan, tuple(received)
        ctx.save_for_backward(x, weight, bias, *received.values())
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of own block, weight and bias."""
        plan: SpacePlan = ctx.plan
        x, weight, bias, *values = ctx.saved_tensors
        received, needs = dict(zip(ctx.peers, values, strict=True)), ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():

            def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
                # The window is made anew from what arrived before; its backward sends as ever.
                window = HaloExchangeMap.apply(x, replace(plan.exchange, landed=received))
                return plan.of_window(window, weight, bias)

            return *slopes(forward, (x, weight, bias), needs, grads[0]), None
        if plan.cover is not None:
            return *_by_patches(plan, plan.cover, grads[0], x, weight, received, needs), None
        window = filled(x, plan.exchange, received)
        return *_by_window(plan, grads[0], window, weight, needs), None


# What `Function.apply` ends in when no transform of torch.func is active; see `LinearMap`.
_recorded: Any = super(torch.autograd.Function, ConvInSpace).apply  # type: ignore[misc]


def convolved_in_space(x: Tensor, weight: Tensor, bias: Tensor | None, plan: SpacePlan) -> Tensor:
    """Return the own share of a convolution of the own block."""
    inside = None if plan.extends else bias
    if plan.exchange.halo.is_identity:  # the window is the block: torch's own is fastest
        y = plan.of_window(x, weight, inside)
    elif not is_plain(x):
        y = plan.of_window(HaloExchangeMap.apply(x, plan.exchange), weight, inside)
    elif torch.is_grad_enabled():
        y = _recorded(x, weight, inside, plan)
    else:
        y, _ = _convolved(x, weight, inside, plan)
    if plan.crops and not plan.is_void:
        y = plan.cropped(y)
    if inside is bias or bias is None:
        return y
    return y + bias.to(y.dtype).view(-1, *[1] * plan.settings.dims)


def _convolved(
    x: Tensor, weight: Tensor, bias: Tensor | None, plan: SpacePlan
) -> tuple[Tensor, dict[int, Tensor]]:
    """Return the own share, and what has arrived from other ranks for it."""
    if plan.cover is not None:
        view, padding = x[_in_space(plan.cover.view)], plan.cover.padding
        pending = start_exchange(x, plan.exchange)
        y = plan.settings.convolved(view, weight, bias, padding=padding)
        received = pending.wait()
        for patch, window in _patches(plan, plan.cover, received):
            y[_in_space(patch.output)] += plan.settings.convolved(window, weight, None)
        return y, received
    received = exchanged(x, plan.exchange)
    if plan.is_void:
        return x.new_zeros(plan.shape), received
    window = filled(x, plan.exchange, received)
    return plan.settings.convolved(window, weight, bias, padding=plan.padding), received


def _patches(
    plan: SpacePlan, cover: Cover, received: dict[int, Tensor]
) -> Iterator[tuple[Patch, Tensor]]:
    """Yield each patch with its window: a piece that has arrived, and zeros around it."""
    messages = arrived(plan.exchange, received, plan.exchange.halo.recvs)
    pieces = [values for _, parts in messages for values in parts]
    for patch, values in zip(cover.patches, pieces, strict=True):
        window = values.new_zeros(patch.window_shape)
        place(window, patch.piece, values)
        yield patch, window


def _by_window(
    plan: SpacePlan, dy: Tensor, window: Tensor, weight: Tensor, needs: Sequence[bool]
) -> Gradients:
    """Return the gradients of a convolution of a whole window."""
    if plan.is_void:
        dw, db = torch.zeros_like(weight), weight.new_zeros(plan.settings.out_channels)
        dwindow = torch.zeros_like(window)
    else:
        mask = (needs[0], needs[1], needs[2])
        dwindow, dw, db = plan.settings.gradients(dy, window, weight, mask, plan.padding)
    if not needs[0] or dwindow is None:
        return None, dw, db if needs[2] else None
    return HaloAddMap.kernel(dwindow, plan.exchange), dw, db if needs[2] else None


def _by_patches(
    plan: SpacePlan,
    cover: Cover,
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    received: dict[int, Tensor],
    needs: Sequence[bool],
) -> Gradients:
    """Return the gradients; those of other ranks' points travel while the own are computed."""
    settings, exchange = plan.settings, plan.exchange
    needs_x, needs_w, needs_b = needs
    home: list[Tensor] = []
    parts: list[Tensor] = []
    for patch, window in _patches(plan, cover, received):
        part = dy[_in_space(patch.output)]
        g, w, _ = settings.gradients(part, window, weight, (needs_x, needs_w, False))
        if g is not None:
            home.append(gathered(g, patch.piece))
        if w is not None:
            parts.append(w)
    pending: Pending[dict[int, Tensor]] | None = None
    if needs_x:
        each = iter(home)
        sends = [(m, joined([next(each) for _ in m.pieces])) for m in exchange.halo.recvs]
        pending = post(exchange, sends, exchange.halo.sends, x)
    inside = _in_space(cover.view)
    mask = (needs_x, needs_w, needs_b)
    dx, dw, db = settings.gradients(dy, x[inside], weight, mask, cover.padding)
    if dw is not None:
        for w in parts:
            dw += w
    if dx is None or pending is None:
        return None, dw, db
    if dx.shape != x.shape:
        whole = torch.zeros_like(x)
        whole[inside] = dx
        dx = whole
    for message, values in arrived(exchange, pending.wait(), exchange.halo.sends):
        for piece, part in zip(message.pieces, values, strict=True):
            dx[piece.source_slices] += part
    return dx, dw, db


def empty_output(window: Tensor, weight: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a share of zeros that runs the backwards which other ranks' shares run.

    As with a convolution, every gradient depends on window and weight: second derivatives send
    what they send elsewhere.
    """
    return ((window.sum() + weight.sum()).square() * 0).expand(shape)


def _in_space(box: Box) -> tuple[slice, ...]:
    return (slice(None), slice(None), *(slice(start, stop) for start, stop in box))
