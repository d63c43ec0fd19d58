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
from operator import index
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from unisono.comm.perform import Pending
from unisono.errors import PartitionError
from unisono.expect import expect_choice
from unisono.nn.agreement import Cuts
from unisono.operators.halo import (
    HaloAdd,
    HaloExchange,
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
from unisono.topology import Partition
from unisono.topology.cover import Cover, Patch, cover
from unisono.topology.halo import Box, HaloPlan
from unisono.topology.window import PADDING_MODES, padding_pairs, per_dim

Overlap = Literal["auto"] | bool
Size = int | Sequence[int]
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
        wanted: tuple[bool, bool, bool],
        padding: tuple[int, ...] | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of window, weight and bias that are wanted. Not differentiable."""
        none = (0,) * self.dims
        return torch.ops.aten.convolution_backward(
            dy, window, weight, [dy.shape[1]], self.stride, none if padding is None else padding,
            self.dilation, self.output_padding is not None, self.output_padding or none,
            self.groups, wanted,
        )  # fmt: skip


def check_space(name: str, P_x: Partition, dims: int) -> None:
    """Raise unless a partition splits a tensor of `dims` spatial dims in batch and space alone."""
    if P_x.dim != dims + 2 or P_x.shape[1] != 1:
        raise PartitionError.because(
            f"{name} on {P_x!r}",
            f"{P_x.dim} dims, {P_x.shape[1] if P_x.dim > 1 else '?'} in channels",
            f"needs {dims + 2} dims with 1 in dim 1",
            f"Partition([1, 1, {', '.join(['2'] * dims)}])",
        )


def check_channels(name: str, wanted: int, cuts: Cuts) -> None:
    """Raise unless an input has as many channels as a convolution was made for."""
    found = cuts[1][-1]
    if found != wanted:
        raise PartitionError.because(
            f"{name}(in_channels={wanted})",
            f"an input of global shape {[own[-1] for own in cuts]}",
            f"{found} channels != {wanted}",
            f"in_channels={found}",
        )


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
        index(in_channels), index(out_channels), kernel, strides, pads, dilations, index(groups),
        padding_mode,
    )  # fmt: skip


Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Of own block, weight and bias."""


@dataclass(frozen=True)
class SpacePlan:
    """How one rank convolves its share in space."""

    settings: ConvSettings
    exchange: HaloOnGroup
    cover: Cover | None
    """The pass over the own block and its patches; None: all of it from a window."""
    padding: tuple[int, ...] | None = None
    """Zeros that the window does not hold, on both sides of each dim; None: it holds them all."""

    @property
    def halo(self) -> HaloPlan:
        """How the window is filled."""
        return self.exchange.halo

    def output_shape(self, weight: Tensor) -> tuple[int, ...]:
        """Return the shape of the own share."""
        batch, _, *space = self.exchange.halo.output_shape
        return (batch, weight.shape[0], *space)


def space_plan(settings: ConvSettings, exchange: HaloOnGroup, overlap: Overlap) -> SpacePlan:
    """Return how the share of a rank is convolved: over the own block and patches, or a window.

    By the rule of "auto": without patches the pass over the own block saves the window and costs
    nothing. With them it must be worth it: the window's copy saved and the wait hidden, against a
    few small convolutions more.
    """
    s, halo = settings, exchange.halo
    found = cover(halo, s.kernel_size, s.stride, s.dilation, s.padding) if overlap else None
    if found is not None and found.patches and overlap == "auto":
        taps = math.prod(s.kernel_size) * s.out_channels // s.groups
        is_large = math.prod(halo.output_shape) * taps >= LEAST_WORK
        overlap = is_large and found.patched_share <= MOST_PATCHED
    return SpacePlan(settings, exchange, found if overlap else None)


class ConvInSpace(torch.autograd.Function):
    """Own block, parameters -> own share of the output."""

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
        received = dict(zip(ctx.peers, values, strict=True))
        if torch.is_grad_enabled():
            return *_composed(plan, grads[0], (x, weight, bias), received), None
        wanted = ctx.needs_input_grad[:3]
        if plan.cover is not None:
            return *_by_patches(plan, plan.cover, grads[0], x, weight, received, wanted), None
        window = _whole_window(plan, x, received)
        return *_by_window(plan, grads[0], window, weight, wanted), None


# What `Function.apply` ends in when no transform of torch.func is active; see `LinearMap`.
_recorded: Any = super(torch.autograd.Function, ConvInSpace).apply  # type: ignore[misc]


def convolved_in_space(x: Tensor, weight: Tensor, bias: Tensor | None, plan: SpacePlan) -> Tensor:
    """Return the own share, for tensors on which nothing but autograd looks (`is_plain`)."""
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _recorded(x, weight, bias, plan)
    return _convolved(x, weight, bias, plan)[0]


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
    if 0 in plan.exchange.halo.output_shape:
        return x.new_empty(plan.output_shape(weight)), received
    window = _whole_window(plan, x, received)
    return plan.settings.convolved(window, weight, bias, padding=plan.padding), received


def _whole_window(plan: SpacePlan, x: Tensor, received: dict[int, Tensor]) -> Tensor:
    """Return the window, of the own block and what has arrived."""
    if plan.exchange.halo.is_identity:
        return x
    return filled(x, plan.exchange, received)


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
    plan: SpacePlan, dy: Tensor, window: Tensor, weight: Tensor, wanted: Sequence[bool]
) -> Gradients:
    """Return the gradients of a convolution of a whole window."""
    if 0 in plan.output_shape(weight):
        dw, db = torch.zeros_like(weight), weight.new_zeros(weight.shape[0])
        dwindow = torch.zeros_like(window)
    else:
        mask = (wanted[0], wanted[1], wanted[2])
        dwindow, dw, db = plan.settings.gradients(dy, window, weight, mask, plan.padding)
    if not wanted[0] or dwindow is None:
        return None, dw, db if wanted[2] else None
    is_copy = plan.exchange.halo.is_identity
    dx = dwindow if is_copy else HaloAdd.kernel(dwindow, plan.exchange)
    return dx, dw, db if wanted[2] else None


def _by_patches(
    plan: SpacePlan,
    cover: Cover,
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    received: dict[int, Tensor],
    wanted: Sequence[bool],
) -> Gradients:
    """Return the gradients; those of other ranks' points travel while the own are computed."""
    settings, exchange = plan.settings, plan.exchange
    needs_x, needs_w, needs_b = wanted
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
        pending = post(exchange, sends, exchange.halo.sends, x.dtype)
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


def _composed(
    plan: SpacePlan,
    dy: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor | None],
    received: dict[int, Tensor],
) -> list[Tensor | None]:
    """Return the gradients as functions that can be differentiated again.

    The window is made anew from what arrived in the forward; its own backward sends as ever.
    """
    x, weight, bias = inputs
    held = [t for t in inputs if t is not None and t.requires_grad]
    with torch.enable_grad():
        window = x
        if not plan.exchange.halo.is_identity:
            landed = replace(plan.exchange, landed=received)
            window = HaloExchange.apply(x, landed)
        shape = plan.output_shape(weight)
        if 0 in shape:
            y = empty_output(window, weight, bias, shape)
        else:
            y = plan.settings.convolved(window, weight, bias, padding=plan.padding)
    found = iter(torch.autograd.grad(y, held, dy, create_graph=True, allow_unused=True))
    return [next(found) if t is not None and t.requires_grad else None for t in inputs]


def empty_output(
    window: Tensor, weight: Tensor, bias: Tensor | None, shape: tuple[int, ...]
) -> Tensor:
    """Return a share without elements that runs the backwards which other ranks' shares run.

    As with a convolution, every gradient depends on window and weight: second derivatives send
    what they send elsewhere.
    """
    tie = (window.sum() + weight.sum()).square() * 0
    if bias is not None:
        tie = tie + bias.sum() * 0
    return tie.expand(shape)


def _in_space(box: Box) -> tuple[slice, ...]:
    return (slice(None), slice(None), *(slice(start, stop) for start, stop in box))
