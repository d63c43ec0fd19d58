"""Norms of split tensors: batch, group, instance, layer and RMS norm, with moments of all ranks.

Torch's functions on split tensors. What stands here are the parameters and running statistics, of
which each rank holds a balanced block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unisono.comm import Communicator
from unisono.errors import PartitionError
from unisono.nn.agreement import Table
from unisono.nn.layers.function_layer import FunctionLayer, FunctionPlan
from unisono.nn.parameters import Weights, check_weights, current_state_mode, nothing, part
from unisono.nn.planned import check_dims, check_sizes
from unisono.nn.precision import wide, wide_dtype
from unisono.nn.split_tensors.tensor import Cut, made
from unisono.topology import Partition
from unisono.topology.decompose import block, split_cuts, split_sizes
from unisono.topology.window import as_int


class _Norm(FunctionLayer):
    """What all norms share: a scale and a shift, in the blocks of some dims of the tensor."""

    _balances = False
    weight: nn.Parameter | None
    bias: nn.Parameter | None

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
        for name in ("weight", "bias"):
            self._hold(name, self._block, everywhere=self._is_everywhere)
        ones = torch.ones(self._holdings["weight"].shape, dtype=dtype, device=device)
        self.register_parameter("weight", nn.Parameter(ones) if affine else None)
        shift = nn.Parameter(torch.zeros_like(ones)) if affine and bias else None
        self.register_parameter("bias", shift)

    def _users(self, name: str) -> Partition | None:  # noqa: ARG002
        axes = tuple(d for d in range(self.P_x.dim) if d not in self._dims)
        return self.P_x.sub(axes) if self.P_x.active else None

    def _make_plan(self, tables: Sequence[Table]) -> FunctionPlan:
        plan, P = super()._make_plan(tables), self.P_x
        check_sizes(type(self).__name__, self._block.global_shape, self._dims, plan.shape)
        sizes = enumerate(zip(self._block.global_shape, self._dims, strict=True))
        cuts = {
            i: Cut(split_sizes(n, P.shape[dim]), P.sub(dim).comm)
            for i, (n, dim) in sizes
            if P.shape[dim] > 1
        }
        return replace(plan, parameters=cuts)

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised block."""
        if not self._takes_part:
            return self._outside(input)
        x = self._tied(input)
        return self._normalised(x if self._plan.cuts else wide(x)).to(input.dtype)

    def _normalised(self, x: Tensor) -> Tensor:
        """Return the block, normalised, in any precision."""
        raise TypeError(f"{type(self).__name__} has no norm for {x.shape}")

    def _affine(self, x: Tensor) -> dict[str, Tensor | None]:
        """Return scale and shift for work on a block; their gradients are summed."""
        values = [*self._used("weight", "bias"), None, None]
        dtype = wide_dtype(x.dtype)
        return {
            name: None if t is None else self._cut(t.to(dtype))
            for name, t in zip(("weight", "bias"), values, strict=False)
        }

    def _cut(self, t: Tensor) -> Tensor:
        """Show the own block of a parameter, or of statistics, as a split tensor."""
        plan = self._plan
        if not plan.parameters:
            return t
        return made(t, self._block.global_shape, plan.parameters, plan.run)

    def _check_values(self, statistics: int, hint: str) -> None:
        """Raise unless there are at least two values behind each statistic."""
        count = math.prod(self._plan.shape)
        if count <= statistics:
            raise PartitionError.because(
                f"{type(self).__name__} with statistics of the input",
                f"an input of global shape {list(self._plan.shape)}",
                f"{count} values for {statistics} variances: {count} <= {statistics}",
                hint,
            )


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
            self._hold(name, self._block, everywhere=self._is_everywhere, is_buffer=True)

    def _with_running(
        self, function: Any, x: Tensor, uses_input: bool, factor: float, updates: bool
    ) -> Tensor:
        """Call torch's norm with the running statistics, which it reads or moves by `factor`."""
        x = x if uses_input else wide(x)
        running = [self.running_mean, self.running_var] if updates or not uses_input else [None] * 2
        dtype = wide_dtype(x.dtype)
        wider = [None if t is None else t.to(dtype) for t in running]
        mean, variance = (None if t is None else self._cut(t) for t in wider)
        affine = self._affine(x)
        flag = "training" if function is F.batch_norm else "use_input_stats"
        y: Tensor = self._called(
            function, x, running_mean=mean, running_var=variance, **affine,
            **{flag: uses_input}, momentum=factor, eps=self.eps,
        )  # fmt: skip
        for kept, moved in zip(running, wider, strict=True):
            if updates and kept is not None and moved is not None and moved is not kept:
                kept.copy_(moved)
        return y


class DistributedBatchNorm(_Tracking):
    """`torch.nn.BatchNorm1d/2d/3d` of a tensor of 2 to 5 dims, split in any of them.

    Args:
        P_x: partition of the input; dim 1 splits the channels.
        num_features: channels of the whole tensor. The further arguments are torch's.
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

    @property
    def _rule_sums_gradients(self) -> bool:
        return self.weights == "replicated"  # in the message that its backward sends anyway

    def _gradient_comm(self, name: str) -> Communicator | None:
        return None if self._rule_sums_gradients else super()._gradient_comm(name)

    def _normalised(self, x: Tensor) -> Tensor:
        uses_batch = self.training or self.running_mean is None
        if uses_batch:
            hint = "a larger batch, or eval() with running statistics"
            self._check_values(self.num_features, hint)
        updates = self.training and self.track_running_stats
        factor = 0.0 if self.momentum is None else self.momentum
        if updates and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        return self._with_running(F.batch_norm, x, uses_batch, factor, updates)

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
            whole groups. Blocks that cut a group are moved there and back.
        num_groups: groups of the whole tensor.
        num_channels: channels of the whole tensor. The further arguments are torch's.
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
        call = f"{name}(num_groups={self.num_groups}, num_channels={self.num_channels})"
        if self.num_groups < 1 or self.num_channels % self.num_groups:
            raise PartitionError.because(
                call,
                f"{self.num_channels} channels in {self.num_groups} equal groups",
                "the channels do not divide evenly",
                f"num_groups={math.gcd(max(self.num_groups, 1), self.num_channels)}",
            )
        width = self.num_channels // self.num_groups
        cuts = split_cuts(self.num_channels, P.shape[1])
        inside = next((cut for cut in cuts if width and cut % width), None)
        if inside is not None:
            raise PartitionError.because(
                f"{call} on {P!r}",
                f"channels cut at {list(cuts)}, groups of {width}",
                f"the cut at {inside} lies inside a group: {inside} % {width} = {inside % width}",
                f"a number of ranks along dim 1 that divides {self.num_groups}, or 1",
            )

    def _normalised(self, x: Tensor) -> Tensor:
        if math.prod(self._plan.shape) == self.num_groups:
            self._check_values(self.num_groups, "a larger batch, fewer groups, or a larger image")
        return self._called(F.group_norm, x, self.num_groups, **self._affine(x), eps=self.eps)


class DistributedInstanceNorm(DistributedGroupNorm, _Tracking):
    """`torch.nn.InstanceNorm1d/2d/3d` of a tensor of 3 to 5 dims, split in any of them.

    Args:
        P_x: partition of the input; dim 1 splits the channels.
        num_features: channels of the whole tensor. The further arguments are torch's.
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
        uses_input = self.training or self.running_mean is None
        if uses_input and math.prod(self._plan.shape[2:]) == 1:
            hint = "a larger image, or eval() with running statistics"
            self._check_values(math.prod(self._plan.shape[:2]), hint)
        factor = 0.0 if self.momentum is None else self.momentum
        return self._with_running(F.instance_norm, x, uses_input, factor, self.training)


class DistributedLayerNorm(_Norm):
    """`torch.nn.LayerNorm` of a tensor split in any dims.

    Args:
        P_x: partition of the input.
        normalized_shape: sizes of the last dims of the whole tensor, by which scale and shift are
            cut. The further arguments are torch's.
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

    def _normalised(self, x: Tensor) -> Tensor:
        affine, eps = self._affine(x), self.eps or 0.0
        return self._called(F.layer_norm, x, self.normalized_shape, **affine, eps=eps)


class DistributedRMSNorm(DistributedLayerNorm):
    """`torch.nn.RMSNorm` of a tensor split in any dims.

    Args:
        P_x: partition of the input.
        normalized_shape: sizes of the last dims of the whole tensor, by which the scale is cut.
            The further arguments are torch's.
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
        weight = self._affine(x)["weight"]
        return self._called(F.rms_norm, x, self.normalized_shape, weight=weight, eps=self.eps)
