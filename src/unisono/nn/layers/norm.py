"""Layer, RMS, group and instance norm of split tensors: moments of all ranks that share them.

Each rank takes mean and squared deviations of its own part; one message merges them. Channels that
are not in balanced blocks, as the parameters are, are moved there and back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from unisono.comm import Communicator
from unisono.errors import PartitionError, an
from unisono.nn.agreement import Cuts, Table
from unisono.nn.parameters import Holding, Weights, check_weights, nothing
from unisono.nn.planned import balanced_in, recut, wide
from unisono.nn.state import HoldingModule
from unisono.operators import Repartition, all_gather
from unisono.operators.halo import HaloExchange, HaloOnGroup
from unisono.operators.repartition import RepartitionOnGroup
from unisono.topology import Partition
from unisono.topology.decompose import block, split_cuts
from unisono.topology.halo import HaloPlan
from unisono.topology.overlap import OverlapPlan, overlaps
from unisono.topology.window import as_int

P = TypeVar("P")

__all__ = [
    "DistributedGroupNorm",
    "DistributedInstanceNorm",
    "DistributedLayerNorm",
    "DistributedRMSNorm",
]


def merged_moments(
    mean: Tensor, squares: Tensor, counts: list[int], comm: Communicator
) -> tuple[Tensor, Tensor]:
    """Return mean and sum of squared deviations over all ranks. Differentiable; collective.

    Args:
        mean: own mean; whatever it is counts for nothing where the own count is 0.
        squares: own sum of squared deviations from it.
        counts: number of values behind each rank's mean, by rank of `comm`.
        comm: the ranks.
    """
    if comm.size == 1:
        return mean, squares
    rows = all_gather(torch.stack([mean, squares])[None], 0, [1] * comm.size, comm=comm)
    return merged(rows, counts)


def merged(rows: Tensor, counts: list[int]) -> tuple[Tensor, Tensor]:
    """Return mean and sum of squared deviations over ranks, from `[ranks, 2, ...]` of them."""
    if len(counts) == 1:
        return rows[0, 0], rows[0, 1]
    means, sums = rows[:, 0], rows[:, 1]
    weights = torch.tensor(counts, dtype=rows.dtype, device=rows.device)
    weights = weights.reshape(-1, *(1,) * (means.dim() - 1))
    whole = (weights * means).sum(0) / sum(counts)
    return whole, (sums + weights * (means - whole) ** 2).sum(0)


def own_moments(
    x: Tensor, dims: tuple[int, ...], *, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Return own mean and sum of squared deviations over `dims`; zeros where there is nothing."""
    if x.numel() == 0:  # no values, or no place to have a mean of
        empty = x.sum(dims, keepdim=keepdim)
        return empty, empty
    count = math.prod(x.shape[dim] for dim in dims)
    variance, mean = torch.var_mean(x, dims, correction=0, keepdim=keepdim)
    return mean, variance * count


def balanced_channels(layer: str, count: int, P: Partition, cuts: Cuts) -> tuple[int, ...]:
    """Return the balanced cuts of `count` channels; raise if the input has more or fewer.

    Args:
        layer: name of the layer, for messages.
        count: channels that it was made for.
        P: partition of the input.
        cuts: of the input, in every dim.
    """
    found = cuts[1][-1]
    if found != count:
        raise PartitionError.because(
            f"{layer} of {count} channels",
            f"an input of global shape {[own[-1] for own in cuts]}",
            f"{found} channels != {count}",
            f"{an(layer)} of {found} channels",
        )
    return tuple(split_cuts(count, P.shape[1]))


@dataclass(frozen=True)
class ChannelMove:
    """Channels to balanced blocks, those of the parameters, and back to where they came from."""

    P: Partition
    there: HaloPlan
    back: HaloPlan

    def around(self, normalise: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return the block that the input's cuts give this rank, normalised in balanced blocks."""
        return self._moved(normalise(self._moved(x, self.there)), self.back)

    def _moved(self, x: Tensor, plan: HaloPlan) -> Tensor:
        if plan.is_identity:
            return x
        return HaloExchange.apply(x, HaloOnGroup(self.P.root, plan, self.P.ranks, 0.0))


def channel_move(P: Partition, cuts: Cuts) -> ChannelMove | None:
    """Return how channels get to balanced blocks; None where they are."""
    balanced = balanced_in(cuts, 1)
    if P.index is None or balanced == tuple(map(tuple, cuts)):
        return None
    return ChannelMove(P, recut(cuts, balanced, P.index), recut(balanced, cuts, P.index))


@dataclass(frozen=True)
class _LayerNormPlan:
    comm: Communicator
    """Ranks that share this rank's samples."""
    counts: list[int]
    total: int
    affine: OverlapPlan
    """From balanced blocks of the affine parameters to those of the input."""


class DistributedLayerNorm(HoldingModule[_LayerNormPlan]):
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
        self.P_x = P_x
        self.normalized_shape = tuple(shape)
        self.eps: float | None = eps
        self.elementwise_affine = elementwise_affine
        if not 0 < len(self.normalized_shape) <= P_x.dim:
            raise PartitionError.because(
                f"{type(self).__name__}(normalized_shape={list(self.normalized_shape)})",
                f"{P_x!r}",
                f"not 0 < {len(self.normalized_shape)} <= {P_x.dim}",
                "sizes of the last dims",
            )
        self.weights: Weights = check_weights(weights)
        holding = stored = nothing(self.normalized_shape)
        if P_x.active and P_x.index is not None:
            own = [
                (cuts[i], cuts[i + 1])
                for cuts, i in zip(self._balanced(), P_x.index[-self._dims :], strict=True)
            ]
            holding = Holding(
                self.normalized_shape, tuple(a for a, _ in own), tuple(b - a for a, b in own)
            )
            if weights == "replicated" or not any(P_x.index[: -self._dims]):
                stored = holding
        self._block = holding.shape
        everywhere = weights == "replicated" and P_x.size == P_x.root.size and self._is_unsplit
        self._hold_affine(
            stored, affine=elementwise_affine, bias=bias, replicated=everywhere, dtype=dtype,
            device=device,
        )  # fmt: skip

    @property
    def _dims(self) -> int:
        return len(self.normalized_shape)

    @property
    def _is_unsplit(self) -> bool:
        return math.prod(self.P_x.shape[-self._dims :]) == 1

    def _balanced(self) -> list[tuple[int, ...]]:
        """Return the cuts of the affine parameters."""
        return [
            split_cuts(n, parts)
            for n, parts in zip(self.normalized_shape, self.P_x.shape[-self._dims :], strict=True)
        ]

    def _describe(self) -> tuple[object, ...]:
        flags = (self.eps, self.weight is not None, self.bias is not None, self.weights)
        return (self.P_x, self.normalized_shape, *flags)

    def _make_plan(self, tables: Sequence[Table]) -> _LayerNormPlan:
        (table,) = tables
        table.dtype(self.P_x)
        cuts = table.cuts(self.P_x)
        found = tuple(own[-1] for own in cuts[-self._dims :])
        if found != self.normalized_shape:
            raise PartitionError.because(
                f"{type(self).__name__}(normalized_shape={list(self.normalized_shape)})",
                f"an input of global shape {[own[-1] for own in cuts]}",
                f"{list(found)} != {list(self.normalized_shape)}",
                f"normalized_shape={list(found)}",
            )
        axes = tuple(range(self.P_x.dim - self._dims, self.P_x.dim))
        same = self.P_x.sub(axes)
        counts = [math.prod(table.of(rank).shape[-self._dims :]) for rank in same.ranks]
        moved = overlaps(
            self._balanced(), same.ranks, cuts[-self._dims :], same.ranks, self.P_x.root.rank
        )
        return _LayerNormPlan(same.comm, counts, sum(counts), moved)

    def _users(self, name: str) -> Partition | None:  # noqa: ARG002
        axes = tuple(range(self.P_x.dim - self._dims))
        return self.P_x.sub(axes) if self.P_x.active else None

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised block."""
        if not self._takes_part:
            return self._outside(input)
        plan = self._plan
        x = wide(self._tied(input))
        dims = tuple(range(input.dim() - self._dims, input.dim()))
        mean, squares = own_moments(x, dims, keepdim=True)
        mean, squares = merged_moments(mean, squares, plan.counts, plan.comm)
        y = self._normalised(x, mean, squares / max(plan.total, 1))
        held = self._used(("weight", "bias"), [self._block] * 2)
        if held:
            y = y * self._moved(held[0])
        if len(held) > 1:
            y = y + self._moved(held[1])
        return y.to(input.dtype)

    def _normalised(self, x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        return (x - mean) * torch.rsqrt(variance + (self.eps or 0.0))

    def _moved(self, parameter: Tensor) -> Tensor:
        """Return an affine parameter in the blocks of the input."""
        overlap = self._plan.affine
        if overlap.is_identity:
            return parameter
        after = overlap.dest_shape or (0,)
        plan = RepartitionOnGroup(self.P_x.root, overlap, tuple(parameter.shape), after)
        return Repartition.apply(parameter, plan)


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

    def _normalised(self, x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        return x * torch.rsqrt(variance + mean**2 + eps)


class ChannelNorm(HoldingModule[P]):
    """What batch, group and instance norm share: a scale and a shift for each channel (dim 1)."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    P_x: Partition
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    def _hold_channels(
        self,
        P_x: Partition,
        count: int,
        weights: Weights,
        *,
        affine: bool,
        bias: bool,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
    ) -> None:
        """Make weight and bias of the own channels."""
        self.P_x = P_x
        self.weights = check_weights(weights)
        self._channels = stored = nothing((count,))
        if P_x.active and P_x.index is not None:
            c0, c1 = block(count, P_x.shape[1], P_x.index[1])
            self._channels = Holding((count,), (c0,), (c1 - c0,))
            if weights == "replicated" or not any((P_x.index[0], *P_x.index[2:])):
                stored = self._channels
        self._is_everywhere = P_x.shape[1] == 1 and P_x.size == P_x.root.size
        """Whether every rank uses all channels."""
        self._hold_affine(
            stored, affine=affine, bias=bias, dtype=dtype, device=device,
            replicated=self._is_everywhere and weights == "replicated",
        )  # fmt: skip

    def _hold_running(
        self, tracked: bool, dtype: torch.dtype | None, device: torch.device | str | None
    ) -> None:
        """Make the running statistics of the own channels."""
        shape = self._channels.shape
        mean = torch.zeros(shape, dtype=dtype, device=device) if tracked else None
        var = torch.ones(shape, dtype=dtype, device=device) if tracked else None
        number = torch.tensor(0, dtype=torch.long, device=device) if tracked else None
        self.register_buffer("running_mean", mean)
        self.register_buffer("running_var", var)
        self.register_buffer("num_batches_tracked", number)
        for name in ("running_mean", "running_var"):
            self._hold(name, self._channels, replicated=self._is_everywhere)

    def _users(self, name: str) -> Partition | None:  # noqa: ARG002
        axes = tuple(dim for dim in range(self.P_x.dim) if dim != 1)
        return self.P_x.sub(axes) if self.P_x.active else None


def scaled(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return a normalised block with scale and shift of its channels, as far as there are."""
    shape = (1, -1, *(1,) * (y.dim() - 2))
    y = y if weight is None else y * weight.view(shape)
    return y if bias is None else y + bias.view(shape)


@dataclass(frozen=True)
class _GroupNormPlan:
    """What a rank does: its groups, and with whom it shares them."""

    comm: Communicator
    """Ranks that hold other points of this rank's samples and channels."""
    counts: list[int]
    """Values of a group on each of them."""
    total: int
    """Values of a group on all of them."""
    own: int
    """Values of a group here."""
    groups: int
    """Of this rank."""
    global_shape: tuple[int, ...]
    move: ChannelMove | None = None
    """Where channels are not in balanced blocks."""


class DistributedGroupNorm(ChannelNorm[_GroupNormPlan]):
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
        self.P_x = P_x
        self.num_groups = num_groups
        self.num_channels = num_channels
        self.eps = eps
        self.affine = affine
        self._check_groups()
        self._hold_channels(
            P_x, num_channels, weights, affine=affine, bias=bias, dtype=dtype, device=device
        )

    def _check_groups(self) -> None:
        name, P = type(self).__name__, self.P_x
        if P.dim < 2:
            raise PartitionError.because(
                f"{name} on {P!r}",
                f"{P.dim} dims",
                "needs 2 or more",
                "Partition([2, 1, 1]): batch, channels, then space",
            )
        asked = f"{name}(num_groups={self.num_groups}, num_channels={self.num_channels})"
        if self.num_groups < 1 or self.num_channels % self.num_groups:
            raise PartitionError.because(
                asked,
                f"{self.num_channels} channels in {self.num_groups} equal groups",
                "the channels do not divide evenly",
                f"num_groups={math.gcd(max(self.num_groups, 1), self.num_channels)}",
            )
        width = self.num_channels // self.num_groups
        cuts = split_cuts(self.num_channels, P.shape[1])
        inside = next((cut for cut in cuts if width and cut % width), None)
        if inside is not None:
            raise PartitionError.because(
                f"{asked} on {P!r}",
                f"channels cut at {list(cuts)}, groups of {width}",
                f"the cut at {inside} lies inside a group: {inside} % {width} = {inside % width}",
                f"a number of ranks along dim 1 that divides {self.num_groups}, or 1",
            )

    def _describe(self) -> tuple[object, ...]:
        flags = (self.eps, self.weight is not None, self.bias is not None, self.weights)
        return (self.P_x, self.num_groups, self.num_channels, *flags)

    def _make_plan(self, tables: Sequence[Table]) -> _GroupNormPlan:
        (table,) = tables
        table.dtype(self.P_x)
        cuts = table.cuts(self.P_x)
        shape = tuple(own[-1] for own in cuts)
        balanced = balanced_channels(type(self).__name__, self.num_channels, self.P_x, cuts)
        same = self.P_x.sub(tuple(range(2, self.P_x.dim)))
        width = self.num_channels // self.num_groups
        counts = [width * math.prod(table.of(rank).shape[2:]) for rank in same.ranks]
        index = self.P_x.index
        channels = 0 if index is None else balanced[index[1] + 1] - balanced[index[1]]
        own = counts[same.rank or 0]
        return _GroupNormPlan(
            same.comm, counts, sum(counts), own, channels // max(width, 1), shape,
            channel_move(self.P_x, cuts),
        )  # fmt: skip

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised block."""
        if not self._takes_part:
            return self._outside(input)
        move = self._plan.move
        if move is None:
            return self._normalised_block(input)
        return move.around(self._normalised_block, self._tied(input))

    def _normalised_block(self, x: Tensor) -> Tensor:
        """Return the block of own channels, balanced as the parameters are."""
        plan = self._plan
        if plan.global_shape[0] * plan.total == 1:
            self._refuse_one_value("a larger batch, fewer groups, or a larger image")
        y, _, _ = self._normalised(wide(self._tied(x)))
        return self._scaled(y).to(x.dtype)

    def _refuse_one_value(self, hint: str) -> None:
        raise PartitionError.because(
            f"{type(self).__name__} of {self.num_channels} channels in {self.num_groups} groups",
            f"an input of global shape {list(self._plan.global_shape)}",
            "one value a group: its variance is 0",
            hint,
        )

    def _normalised(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the own block; mean and sum of squared deviations of whole groups, `(N, g, 1)`."""
        plan = self._plan
        grouped = x.reshape(x.shape[0], plan.groups, plan.own)
        mean, squares = own_moments(grouped, (2,), keepdim=True)
        mean, squares = merged_moments(mean, squares, plan.counts, plan.comm)
        y = (grouped - mean) * torch.rsqrt(squares / max(plan.total, 1) + self.eps)
        return y.reshape(x.shape), mean, squares

    def _scaled(self, y: Tensor) -> Tensor:
        """Return a normalised block with scale and shift of its channels."""
        held = self._used(("weight", "bias"), [self._channels.shape] * 2)
        return scaled(y, held[0] if held else None, held[1] if len(held) > 1 else None)


class DistributedInstanceNorm(DistributedGroupNorm):
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
        if not 3 <= P_x.dim <= 5:
            raise PartitionError.because(
                f"DistributedInstanceNorm on {P_x!r}",
                f"{P_x.dim} dims",
                "needs 3 to 5",
                "Partition([1, 1, 2]): batch, channels, then space",
            )
        super().__init__(
            P_x, num_features, num_features, eps, affine,
            bias=bias, device=device, dtype=dtype, weights=weights,
        )  # fmt: skip
        self.num_features = num_features
        self.momentum = momentum
        self.track_running_stats = track_running_stats
        self._hold_running(track_running_stats, dtype, device)  # torch counts no batches either

    def _describe(self) -> tuple[object, ...]:
        return (*super()._describe(), self.momentum, self.track_running_stats)

    def _normalised_block(self, x: Tensor) -> Tensor:
        given = wide(self._tied(x))
        if not self.training and self.running_mean is not None and self.running_var is not None:
            shape = (1, -1, *(1,) * (x.dim() - 2))
            variance = self.running_var.to(torch.promote_types(given.dtype, self.running_var.dtype))
            inverse = torch.rsqrt(variance + self.eps).view(shape)
            return self._scaled((given - self.running_mean.view(shape)) * inverse).to(x.dtype)
        if self._plan.total == 1:
            self._refuse_one_value("a larger image, or eval() with running statistics")
        y, mean, squares = self._normalised(given)
        if self.training:
            self._track(mean, squares)
        return self._scaled(y).to(x.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, squares: Tensor) -> None:
        """Move the running statistics towards the means over samples. Collective over the batch."""
        samples = self._plan.global_shape[0]
        if self.running_mean is None or self.running_var is None or samples == 0:
            return
        sums = torch.stack([mean, squares / max(self._plan.total - 1, 1)]).sum((1, 3))
        batch = self.P_x.sub(0)
        if batch.size > 1:
            sums = batch.comm.all_reduce(sums)
        factor = 0.0 if self.momentum is None else self.momentum
        for running, new in ((self.running_mean, sums[0]), (self.running_var, sums[1])):
            running.lerp_((new / samples).to(running.dtype), factor)
