"""Batch normalisation over a split tensor: statistics of the whole, whoever holds the parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from unisono.comm import Communicator
from unisono.errors import PartitionError
from unisono.nn.agreement import Table
from unisono.nn.layers.norm import (
    ChannelMove,
    ChannelNorm,
    balanced_channels,
    channel_move,
    merged_moments,
    own_moments,
    scaled,
)
from unisono.nn.parameters import Weights, summed_gradients
from unisono.nn.planned import wide
from unisono.nn.state import current_state_mode
from unisono.operators.linear import identity
from unisono.topology import Partition

__all__ = ["DistributedBatchNorm"]


@dataclass(frozen=True)
class _NormPlan:
    comm: Communicator
    """Ranks that share this rank's channels."""
    counts: list[int]
    """Values a channel on each of them."""
    total: int
    global_shape: tuple[int, ...]
    channels: int
    """Of this rank."""
    dtype: torch.dtype
    """Of the statistics."""
    is_stored_once: bool
    """Weight and bias come from the first of these ranks, where parts of gradients are summed."""
    move: ChannelMove | None = None
    """Where channels are not in balanced blocks."""


class DistributedBatchNorm(ChannelNorm[_NormPlan]):
    """`torch.nn.BatchNorm1d/2d/3d` of a tensor of 2 to 5 dims, split in any of them.

    Args:
        P_x: partition of the input; dim 1 splits the channels. Those that are not in balanced
            blocks, as parameters are, are moved there and back.
        num_features: channels of the whole tensor.
        eps: added to the variance.
        momentum: weight of a new batch in the running statistics; None: their plain average.
        affine: learn a scale and a shift.
        track_running_stats: keep running statistics, used in eval mode.
        bias: False leaves out the shift.
    """

    def __init__(
        self,
        P_x: Partition,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        weights: Weights = "replicated",
    ) -> None:
        super().__init__()
        if not 2 <= P_x.dim <= 5:
            raise PartitionError.because(
                f"DistributedBatchNorm on {P_x!r}",
                f"{P_x.dim} dims",
                "needs 2 to 5",
                "Partition([2, 1, 1]): batch, channels, then space",
            )
        self.num_features = num_features
        self.eps = eps
        self.momentum = momentum
        self.affine = affine
        self.track_running_stats = track_running_stats
        self._hold_channels(
            P_x, num_features, weights, affine=affine, bias=bias, dtype=dtype, device=device
        )
        self._hold_running(track_running_stats, dtype, device)

    def _describe(self) -> tuple[object, ...]:
        flags = (self.eps, self.momentum, self.affine, self.track_running_stats, self.weights)
        return (self.P_x, self.num_features, *flags, self.bias is not None)

    def _make_plan(self, tables: Sequence[Table]) -> _NormPlan:
        (table,) = tables
        table.dtype(self.P_x)
        cuts = table.cuts(self.P_x)
        balanced = balanced_channels(type(self).__name__, self.num_features, self.P_x, cuts)
        same = self.P_x.sub(tuple(dim for dim in range(self.P_x.dim) if dim != 1))
        counts = [
            math.prod(n for dim, n in enumerate(table.of(rank).shape) if dim != 1)
            for rank in same.ranks
        ]
        total = math.prod(own[-1] for dim, own in enumerate(cuts) if dim != 1)
        shape = tuple(own[-1] for own in cuts)
        index = self.P_x.index
        channels = 0 if index is None else balanced[index[1] + 1] - balanced[index[1]]
        dtype = torch.float32 if table.dtype(self.P_x).itemsize == 2 else table.dtype(self.P_x)
        return _NormPlan(
            same.comm, counts, total, shape, channels, dtype, self.weights == "root",
            channel_move(self.P_x, cuts),
        )  # fmt: skip

    def _gradient_comm(self, name: str) -> Communicator | None:  # noqa: ARG002
        return None  # the backward gives the sums of the whole tensor already

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised block."""
        if not self._takes_part:
            return self._outside(input)
        move = self._plan.move
        if move is None:
            return self._normalised(input)
        return move.around(self._normalised, self._tied(input))

    def _normalised(self, x: Tensor) -> Tensor:
        """Return the normalised block of own channels, balanced as the parameters are."""
        if self.training or self.running_mean is None or self.running_var is None:
            mean, squares = self._moments(x)
            plan = self._plan
            if plan.total <= 1:
                raise PartitionError.because(
                    "DistributedBatchNorm with statistics of the batch",
                    f"an input of global shape {list(plan.global_shape)}",
                    f"one value a channel in the whole tensor: {plan.total} <= 1",
                    "a larger batch, or eval() with running statistics",
                )
            weight, bias = self._affine(sums=False)
            y = _BatchNorm.apply(self._tied(x), weight, bias, mean, squares, self.eps, plan)
            if self.training and self.track_running_stats:
                self._track(mean, squares)
            return y
        weight, bias = self._affine(sums=True)
        if x.numel() == 0:  # torch takes no empty block; backwards of any order run all the same
            y = identity(self._tied(x))
            return scaled(y, weight, bias).to(x.dtype)
        return F.batch_norm(
            self._tied(x), self.running_mean, self.running_var, weight, bias, False, 0.0, self.eps
        )

    def _affine(self, *, sums: bool) -> tuple[Tensor | None, Tensor | None]:
        """Return weight and bias of the own channels; with `sums` their gradients are summed."""
        held = self._used(("weight", "bias"), [(self._plan.channels,)] * 2)
        if sums and not self._plan.is_stored_once:
            held = summed_gradients(self._plan.comm, *held)
        return held[0] if held else None, held[1] if len(held) > 1 else None

    @torch.no_grad()
    def _moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and sum of squared deviations of the whole."""
        plan = self._plan
        mean, squares = _channel_moments(wide(x))
        return merged_moments(mean.to(plan.dtype), squares.to(plan.dtype), plan.counts, plan.comm)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        key, root = prefix + "num_batches_tracked", self.P_x.root
        if key in destination and self.P_x.size < root.size and current_state_mode() == "full":
            destination[key] = root.all_reduce(destination[key], "max")  # ranks outside count none

    @torch.no_grad()
    def _track(self, mean: Tensor, squares: Tensor) -> None:
        """Move the running statistics towards this batch's."""
        if self.running_mean is None or self.running_var is None:
            return
        factor = 0.0 if self.momentum is None else self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        unbiased = squares / max(self._plan.total - 1, 1)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)


class _BatchNorm(torch.autograd.Function):
    """Normalise with the statistics of all ranks; one message forward, one backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        squares: Tensor,
        eps: float,
        plan: _NormPlan,
    ) -> Tensor:
        variance = squares / plan.total
        ctx.save_for_backward(x, weight, bias, mean, variance)
        ctx.eps, ctx.plan = eps, plan
        if x.numel() == 0:
            return x.clone()
        held = _like(weight, mean), _like(bias, mean)  # 16-bit values lose no digits on the way
        return F.batch_norm(x, mean, variance, *held, False, 0.0, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, variance = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *_composed_gradients(ctx, grads[0], x, weight, bias), None, None, None, None
        given, dy = wide(x), wide(grads[0])
        plan: _NormPlan = ctx.plan
        sums = mean.new_zeros(2, plan.channels)
        if x.numel():
            _, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
                dy, given, None, mean, variance, None, None, False, ctx.eps, [False, True, True]
            )
            sums = torch.stack([of_bias, of_weight])
        total = plan.comm.all_reduce(sums) if plan.comm.size > 1 else sums
        dx = x.new_zeros(x.shape) if x.numel() == 0 else None
        if dx is None:
            # dx = scale * (dy - total[0] / n - normalised * total[1] / n), in two passes
            scale = torch.rsqrt(variance + ctx.eps)
            scale = scale if weight is None else scale * wide(weight)
            shift, slope = -scale * total / plan.total
            dx = F.batch_norm(given, mean, variance, slope, shift, False, 0.0, ctx.eps)
            dx = dx.addcmul_(dy, scale.view(1, -1, *(1,) * (x.dim() - 2))).to(x.dtype)
        owed = sums if plan.is_stored_once else total
        dw = None if weight is None else owed[1].to(weight.dtype)
        db = None if bias is None else owed[0].to(bias.dtype)
        return dx, dw, db, None, None, None, None


def _composed_gradients(
    ctx: Any, dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None
) -> list[Tensor | None]:
    """Return the gradients as functions that can be differentiated again."""
    plan: _NormPlan = ctx.plan
    inputs = [t for t in (x, weight, bias) if t is not None and t.requires_grad]
    with torch.enable_grad():
        held = [t for t in (weight, bias) if t is not None]
        if held and not plan.is_stored_once:
            held = summed_gradients(plan.comm, *held)
        w, b = held[0] if held else None, held[1] if len(held) > 1 else None
        mean, squares = own_moments(wide(x), _other_dims(x))
        mean, squares = merged_moments(mean, squares, plan.counts, plan.comm)
        shape = (1, -1, *(1,) * (x.dim() - 2))
        inverse = torch.rsqrt(squares / plan.total + ctx.eps)
        y = (wide(x) - mean.view(shape)) * inverse.view(shape)
        affine = [None if t is None else wide(t) for t in (w, b)]
        y = scaled(y, *affine).to(x.dtype)
    found = iter(torch.autograd.grad(y, inputs, dy, create_graph=True, allow_unused=True))
    return [next(found) if t is not None and t.requires_grad else None for t in (x, weight, bias)]


def _channel_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return own mean and sum of squared deviations of each channel (dim 1). Not differentiable."""
    if x.numel() and x.device.type in ("cpu", "cuda"):
        mean, variance = torch.ops.aten.batch_norm_update_stats(x, None, None, 0.0)
        return mean, variance * (x.numel() // x.shape[1])
    return own_moments(x, _other_dims(x))


def _like(t: Tensor | None, other: Tensor) -> Tensor | None:
    return None if t is None else t.to(other.dtype)


def _other_dims(x: Tensor) -> tuple[int, ...]:
    return tuple(dim for dim in range(x.dim()) if dim != 1)
