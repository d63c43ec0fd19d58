"""Norms of split tensors: batch, group, instance, layer and RMS norm, with moments of all ranks.

Each rank takes mean and squared deviations of its own part; one message merges them, and one in the
backward sums what they owe. Points that are not in balanced blocks, as the parameters are, are
moved there and back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unisono.comm import Communicator
from unisono.errors import PartitionError
from unisono.nn.agreement import Table
from unisono.nn.parameters import (
    Weights,
    check_weights,
    held_by,
    nothing,
    part,
    summed_gradients,
)
from unisono.nn.planned import balanced_in, check_dims, check_sizes, index_in, recut
from unisono.nn.precision import wide
from unisono.nn.split_tensors.norms import Over, by_groups, normalized, rms_normed, track
from unisono.nn.state import HoldingModule, current_state_mode
from unisono.operators.halo import HaloExchange, HaloOnGroup
from unisono.operators.linear import identity
from unisono.topology import Partition
from unisono.topology.decompose import block, split_cuts
from unisono.topology.halo import HaloPlan
from unisono.topology.window import as_int


@dataclass(frozen=True)
class _NormPlan:
    comm: Communicator
    """Ranks that share this rank's statistics."""
    counts: list[int]
    """Values behind one of them on each rank."""
    global_shape: tuple[int, ...]
    halo: HaloPlan | None
    """Moves points to balanced blocks, those of the parameters; None where they are."""
    back: HaloOnGroup | None

    @property
    def total(self) -> int:
        """Values behind one statistic on all ranks."""
        return sum(self.counts)


class _Norm(HoldingModule[_NormPlan]):
    """What all norms share: a scale and a shift, in the blocks of some dims of the tensor."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    @property
    def _width(self) -> int:
        """Channels that share a statistic, where it is not taken over dim 1."""
        return 1

    def _hold_blocks(
        self,
        P_x: Partition,
        shape: tuple[int, ...],
        dims: tuple[int, ...],
        weights: Weights,
        *,
        affine: bool,
        bias: bool,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
    ) -> None:
        """Make the own blocks of scale and shift, of `shape`: the sizes of these dims."""
        self.P_x = P_x
        self.weights: Weights = check_weights(weights)
        self._dims = dims
        self._block = nothing(shape)
        if P_x.index is not None:
            index = P_x.index
            cut = [block(n, P_x.shape[d], index[d]) for n, d in zip(shape, dims, strict=True)]
            self._block = part(shape, dict(enumerate(cut)))
        uncut = all(P_x.shape[d] == 1 for d in dims)
        self._is_everywhere = uncut and P_x.size == P_x.root.size
        """Whether every rank uses all of them."""
        stored = held_by(self._users("weight"), self.weights, self._block)
        ones = torch.ones(stored.shape, dtype=dtype, device=device)
        self.register_parameter("weight", nn.Parameter(ones) if affine else None)
        shift = nn.Parameter(torch.zeros_like(ones)) if affine and bias else None
        self.register_parameter("bias", shift)
        for name in ("weight", "bias"):
            self._hold(name, stored, replicated=self._is_everywhere and weights == "replicated")

    def _users(self, name: str) -> Partition | None:  # noqa: ARG002
        axes = tuple(d for d in range(self.P_x.dim) if d not in self._dims)
        return self.P_x.sub(axes) if self.P_x.active else None

    def _shared_dims(self) -> tuple[int, ...]:
        """Return the dims over which a statistic is taken."""
        return tuple(range(2, self.P_x.dim))

    def _make_plan(self, tables: Sequence[Table]) -> _NormPlan:
        (table,) = tables
        P, dims = self.P_x, self._shared_dims()
        table.dtype(P)
        cuts = table.cuts(P)
        check_sizes(type(self).__name__, self._block.global_shape, self._dims, cuts)
        balanced, index = balanced_in(cuts, *self._dims), index_in(P)
        same = P.sub(dims)
        counts: list[int] = []
        for rank in same.ranks:
            place = P.index_of(P.ranks.index(rank))
            sizes = (balanced[d][place[d] + 1] - balanced[d][place[d]] for d in dims)
            counts.append(self._width * math.prod(sizes))
        moves = balanced != cuts
        return _NormPlan(
            same.comm,
            counts,
            tuple(own[-1] for own in cuts),
            recut(cuts, balanced, index) if moves else None,
            HaloOnGroup(P.root, recut(balanced, cuts, index), P.ranks, 0.0) if moves else None,
        )

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised block."""
        if not self._takes_part:
            return self._outside(input)
        back = self._plan.back
        if back is None:
            return self._normalised(input)
        return HaloExchange.apply(self._normalised(self._window(input)), back)

    def _normalised(self, x: Tensor) -> Tensor:
        """Return the block, normalised, for points in balanced blocks."""
        raise TypeError(f"{type(self).__name__} has no norm for {x.shape}")

    def _scale_and_shift(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the own blocks of the parameters; their gradients are summed."""
        held = self._used(("weight", "bias"), [self._block.shape] * 2)
        return held[0] if held else None, held[1] if len(held) > 1 else None


class _Tracking(_Norm):
    """A norm that may keep running statistics of its channels."""

    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None
    eps: float

    def _hold_running(
        self, tracked: bool, dtype: torch.dtype | None, device: torch.device | str | None
    ) -> None:
        """Make the running statistics of the own channels."""
        shape = self._block.shape
        mean = torch.zeros(shape, dtype=dtype, device=device) if tracked else None
        var = torch.ones(shape, dtype=dtype, device=device) if tracked else None
        number = torch.tensor(0, dtype=torch.long, device=device) if tracked else None
        self.register_buffer("running_mean", mean)
        self.register_buffer("running_var", var)
        self.register_buffer("num_batches_tracked", number)
        for name in ("running_mean", "running_var"):
            self._hold(name, self._block, replicated=self._is_everywhere)

    def _by_running(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Return the block, normalised with the running statistics."""
        given = wide(self._tied(x))
        if x.numel() == 0:  # torch takes no empty block; backwards of any order run all the same
            shape = (1, -1, *(1,) * (x.dim() - 2))
            y = identity(given) if weight is None else given * weight.view(shape)
            return (y if bias is None else y + bias.view(shape)).to(x.dtype)
        mean, var, scale, shift = (
            _like(t, given) for t in (self.running_mean, self.running_var, weight, bias)
        )
        y = F.batch_norm(given, mean, var, scale, shift, training=False, eps=self.eps)
        return y.to(x.dtype)


class DistributedBatchNorm(_Tracking):
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
        check_dims("DistributedBatchNorm", P_x, 2, 5)
        self.num_features = num_features
        self.eps = eps
        self.momentum = momentum
        self.affine = affine
        self.track_running_stats = track_running_stats
        self._hold_blocks(
            P_x, (num_features,), (1,), weights,
            affine=affine, bias=bias, dtype=dtype, device=device,
        )  # fmt: skip
        self._hold_running(track_running_stats, dtype, device)

    def _shared_dims(self) -> tuple[int, ...]:
        return tuple(d for d in range(self.P_x.dim) if d != 1)

    def _gradient_comm(self, name: str) -> Communicator | None:  # noqa: ARG002
        return None  # the backward gives the sums of the whole tensor already

    def _normalised(self, x: Tensor) -> Tensor:
        weight, bias = self._scale_and_shift()
        plan, is_summed = self._plan, self.weights == "replicated"
        if not self.training and self.running_mean is not None and self.running_var is not None:
            held = [t for t in (weight, bias) if t is not None]
            if is_summed and held:
                weight, *rest = summed_gradients(plan.comm, *held)
                bias = rest[0] if rest else None
            return self._by_running(x, weight, bias)
        if plan.total <= 1:
            raise PartitionError.because(
                "DistributedBatchNorm with statistics of the batch",
                f"an input of global shape {list(plan.global_shape)}",
                f"one value a channel in the whole tensor: {plan.total} <= 1",
                "a larger batch, or eval() with running statistics",
            )
        shape = (1, -1, *(1,) * (x.dim() - 2))
        w, b = (None if t is None else t.view(shape) for t in (weight, bias))
        over = Over((0, *range(2, x.dim())), plan.total, plan.comm)
        y, mean, variance = normalized(self._tied(x), w, b, over, self.eps, is_summed)
        if self.training and self.track_running_stats:
            factor = 0.0 if self.momentum is None else self.momentum
            if self.num_batches_tracked is not None:
                self.num_batches_tracked.add_(1)
                if self.momentum is None:
                    factor = 1.0 / float(self.num_batches_tracked)
            unbiased = variance * (plan.total / (plan.total - 1))
            track(self.running_mean, self.running_var, mean, unbiased, factor)
        return y

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        key, root = prefix + "num_batches_tracked", self.P_x.root
        if key in destination and self.P_x.size < root.size and current_state_mode() == "full":
            destination[key] = root.all_reduce(destination[key], "max")  # ranks outside count none


class DistributedGroupNorm(_Norm):
    """`torch.nn.GroupNorm` of a tensor `(N, C, ...)` split in any dims, between groups in dim 1.

    Args:
        P_x: partition of the input; dim 1 splits the channels, and balanced blocks of them must be
            whole groups. Channels in other blocks are moved there and back.
        num_groups: groups of the whole tensor.
        num_channels: channels of the whole tensor.
        eps: added to the variance.
        affine: learn a scale and a shift for each channel.
        bias: False leaves out the shift.
    """

    def __init__(
        self,
        P_x: Partition,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        weights: Weights = "replicated",
    ) -> None:
        super().__init__()
        self.num_groups = num_groups
        self.num_channels = num_channels
        self.eps = eps
        self.affine = affine
        self._check_groups(P_x)
        self._hold_blocks(
            P_x, (num_channels,), (1,), weights,
            affine=affine, bias=bias, dtype=dtype, device=device,
        )  # fmt: skip

    def _check_groups(self, P: Partition) -> None:
        name = type(self).__name__
        check_dims(name, P, 2)
        asked = f"{name}(num_groups={self.num_groups}, num_channels={self.num_channels})"
        if self.num_groups < 1 or self.num_channels % self.num_groups:
            raise PartitionError.because(
                asked,
                f"{self.num_channels} channels in {self.num_groups} equal groups",
                "the channels do not divide evenly",
                f"num_groups={math.gcd(max(self.num_groups, 1), self.num_channels)}",
            )
        width = self._width
        cuts = split_cuts(self.num_channels, P.shape[1])
        inside = next((cut for cut in cuts if width and cut % width), None)
        if inside is not None:
            raise PartitionError.because(
                f"{asked} on {P!r}",
                f"channels cut at {list(cuts)}, groups of {width}",
                f"the cut at {inside} lies inside a group: {inside} % {width} = {inside % width}",
                f"a number of ranks along dim 1 that divides {self.num_groups}, or 1",
            )

    @property
    def _width(self) -> int:
        return self.num_channels // self.num_groups

    def _normalised(self, x: Tensor) -> Tensor:
        plan = self._plan
        if plan.global_shape[0] * plan.total == 1:
            self._refuse_one_value("a larger batch, fewer groups, or a larger image")
        return self._by_groups(x)[0]

    def _refuse_one_value(self, hint: str) -> None:
        raise PartitionError.because(
            f"{type(self).__name__} of {self.num_channels} channels in {self.num_groups} groups",
            f"an input of global shape {list(self._plan.global_shape)}",
            "one value a group: its variance is 0",
            hint,
        )

    def _by_groups(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the own block; mean and variance of whole groups, `N * g` of them."""
        plan, groups = self._plan, x.shape[1] // max(self._width, 1)
        held = self._scale_and_shift()
        return by_groups(self._tied(x), groups, *held, plan.total, plan.comm, self.eps)


class DistributedInstanceNorm(DistributedGroupNorm, _Tracking):
    """`torch.nn.InstanceNorm1d/2d/3d` of a tensor of 3 to 5 dims, split in any of them.

    Args:
        P_x: partition of the input; dim 1 splits the channels, in balanced blocks.
        num_features: channels of the whole tensor.
        eps: added to the variance.
        momentum: weight of a new batch in the running statistics; None: they stay.
        affine: learn a scale and a shift.
        bias: False leaves out the shift.
        track_running_stats: keep means of the samples' statistics, used in eval mode.
    """

    def __init__(
        self,
        P_x: Partition,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = False,
        track_running_stats: bool = False,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        weights: Weights = "replicated",
    ) -> None:
        check_dims("DistributedInstanceNorm", P_x, 3, 5)
        super().__init__(
            P_x, num_features, num_features, eps, affine,
            bias=bias, device=device, dtype=dtype, weights=weights,
        )  # fmt: skip
        self.num_features = num_features
        self.momentum = momentum
        self.track_running_stats = track_running_stats
        self._hold_running(track_running_stats, dtype, device)  # torch counts no batches either

    def _normalised(self, x: Tensor) -> Tensor:
        plan = self._plan
        if not self.training and self.running_mean is not None:
            return self._by_running(x, *self._scale_and_shift())
        if plan.total == 1:
            self._refuse_one_value("a larger image, or eval() with running statistics")
        y, mean, variance = self._by_groups(x)
        samples = plan.global_shape[0]
        if self.training and self.running_mean is not None and samples:
            sums = torch.stack([mean, variance * (plan.total / max(plan.total - 1, 1))])
            sums = sums.view(2, *x.shape[:2]).sum(1)
            batch = self.P_x.sub(0)
            if batch.size > 1:
                sums = batch.comm.all_reduce(sums)
            mean, variance = sums / samples
            momentum = 0.0 if self.momentum is None else self.momentum
            track(self.running_mean, self.running_var, mean, variance, momentum)
        return y


class DistributedLayerNorm(_Norm):
    """`torch.nn.LayerNorm` of a tensor split in any dims.

    Args:
        P_x: partition of the input.
        normalized_shape: sizes of the last dims of the whole tensor.
        eps: added to the variance.
        elementwise_affine: learn a scale, in blocks as the partition's last dims cut it.
        bias: learn a shift too.
    """

    def __init__(
        self,
        P_x: Partition,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        weights: Weights = "replicated",
    ) -> None:
        super().__init__()
        one = as_int(normalized_shape)
        shape = (one,) if one is not None else map(int, cast("Sequence[int]", normalized_shape))
        self.normalized_shape = tuple(shape)
        self.eps: float | None = eps
        self.elementwise_affine = elementwise_affine
        count = len(self.normalized_shape)
        if not 0 < count <= P_x.dim:
            raise PartitionError.because(
                f"{type(self).__name__}(normalized_shape={list(self.normalized_shape)})",
                f"{P_x!r}",
                f"not 0 < {count} <= {P_x.dim}",
                "sizes of the last dims",
            )
        self._hold_blocks(
            P_x, self.normalized_shape, tuple(range(P_x.dim - count, P_x.dim)), weights,
            affine=elementwise_affine, bias=bias, dtype=dtype, device=device,
        )  # fmt: skip

    def _shared_dims(self) -> tuple[int, ...]:
        return self._dims

    def _normalised(self, x: Tensor) -> Tensor:
        weight, bias = self._scale_and_shift()
        plan, tied = self._plan, self._tied(x)
        if plan.comm.size == 1 and x.numel():  # nothing to merge: torch's own is fastest
            given = wide(tied)
            scale, shift = _like(weight, given), _like(bias, given)
            own = x.shape[-len(self._dims) :]
            return F.layer_norm(given, own, scale, shift, self.eps or 0.0).to(x.dtype)
        over = Over(self._dims, plan.total, plan.comm)
        return normalized(tied, weight, bias, over, self.eps or 0.0)[0]


class DistributedRMSNorm(DistributedLayerNorm):
    """`torch.nn.RMSNorm` of a tensor split in any dims.

    Args:
        P_x: partition of the input.
        normalized_shape: sizes of the last dims of the whole tensor.
        eps: added to the mean square; None: the smallest step of the dtype, as in torch.
        elementwise_affine: learn a scale, in blocks as the partition's last dims cut it.
    """

    def __init__(
        self,
        P_x: Partition,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        weights: Weights = "replicated",
    ) -> None:
        super().__init__(
            P_x, normalized_shape, 0.0, elementwise_affine, False,
            device=device, dtype=dtype, weights=weights,
        )  # fmt: skip
        self.eps = eps

    def _normalised(self, x: Tensor) -> Tensor:
        weight, _ = self._scale_and_shift()
        over = Over(self._dims, self._plan.total, self._plan.comm)
        return rms_normed(self._tied(x), weight, over, self.eps)


def _like(t: Tensor | None, other: Tensor) -> Tensor | None:
    return None if t is None else t.to(other.dtype)
