"""Pooling split in space and batch: halos from neighbours, then torch's pooling; or one mean."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from unisono.comm.torch import private
from unisono.errors import PartitionError
from unisono.nn.agreement import Table
from unisono.nn.planned import PlannedModule, index_in, is_plain
from unisono.topology import Partition, halo
from unisono.topology.halo import HaloPlan
from unisono.topology.window import check_pool, per_dim, pool_counts

Size = int | Sequence[int]
_MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


class Pool(torch.autograd.Function):
    """Pooling that keeps which points are largest, or nothing, where torch keeps the windows."""

    @staticmethod
    def forward(
        ctx: Any, window: Tensor, name: str, settings: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor | None]:
        """Return what torch's function of that name does, and the places of the largest points."""
        ctx.given = name, settings, window.shape
        if name.startswith("avg"):
            return getattr(F, name)(window, *settings), None
        y, indices = getattr(F, name)(window, *settings, return_indices=True)
        ctx.save_for_backward(indices)
        ctx.mark_non_differentiable(indices)
        return y, indices

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the windows."""
        (name, settings, shape), kept = ctx.given, ctx.saved_tensors
        undo = getattr(
            torch.ops.aten, f"{name}_with_indices_backward" if kept else f"{name}_backward"
        )
        # Of the windows only the shape is read.
        return undo(grads[0], grads[0].new_empty(shape), *settings, *kept), None, None


def lowest(dtype: torch.dtype) -> float:
    """Return what no number of a dtype is below."""
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def off_padding(
    window: Tensor, pooled: Tensor, indices: Tensor, fill: float, lead: Tensor
) -> tuple[Tensor, Tensor]:
    """Give what padding has won to the first point of the tensor, as torch does.

    Padding wins only where all points are as low as it is; values stay, gradients move. `lead` is
    `leading_fill`.
    """
    low = pooled == fill
    is_seen = not torch.compiler.is_compiling() and not private.transforms_active()
    if is_seen and not bool(low.any()):
        return pooled, indices
    indices = torch.where(low, indices + lead.to(indices.device), indices)
    points = window.flatten(2).gather(2, indices.flatten(2)).reshape(pooled.shape)
    return torch.where(low, points, pooled), indices


def leading_fill(
    plan: HaloPlan,
    dims: Iterable[int],
    sizes: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """Return how far behind the first point of each output the first one of the tensor lies.

    Args:
        plan: how windows are filled.
        dims: spatial dims whose padding stands in the window.
        sizes: of the whole input, in space.
        stride: of the pooling, as `padding` and `dilation`.
        padding: points before the first one.
        dilation: from one point of an output to the next.

    Returns:
        Flat places in the window; 0 where no point of the tensor is under an output.
    """
    count, lead = len(sizes), torch.zeros(1, dtype=torch.int64)
    exists = torch.ones(1, dtype=torch.bool)
    for i in dims:
        first, n = plan.output_start[i + 2], plan.output_shape[i + 2]
        begin = torch.arange(first, first + n) * stride[i] - padding[i]
        skipped = -(begin.clamp(max=0) // dilation[i]) * dilation[i]  # rounded up
        shape = (-1, *[1] * (count - 1 - i))
        exists = exists & (begin + skipped < sizes[i]).reshape(shape)
        lead = lead + (skipped * math.prod(plan.window_shape[i + 3 :])).reshape(shape)
    return lead * exists


@dataclass(frozen=True)
class _PoolPlan:
    halo: HaloPlan
    global_space: tuple[int, ...]
    """Spatial sizes of the whole input."""


class _Pool(PlannedModule[_PoolPlan]):
    """What the pooling layers share."""

    dims: ClassVar[int]
    ceil_mode: bool

    def __init__(
        self, P_x: Partition, kernel_size: Size, stride: Size | None, padding: Size, dilation: Size
    ) -> None:
        super().__init__()
        name = type(self).__name__
        if P_x.dim != self.dims + 2:
            raise PartitionError.because(
                f"{name} on {P_x!r}",
                f"{P_x.dim} dims",
                f"needs {self.dims + 2}",
                f"Partition([1, 1, {', '.join(['2'] * self.dims)}])",
            )
        self.P_x = P_x
        self.kernel_size = per_dim(kernel_size, self.dims, "kernel_size")
        self.stride = per_dim(kernel_size if stride is None else stride, self.dims, "stride")
        self.padding = per_dim(padding, self.dims, "padding")
        self.dilation = per_dim(dilation, self.dims, "dilation")
        for dim, (k, p, d) in enumerate(
            zip(self.kernel_size, self.padding, self.dilation, strict=True)
        ):
            check_pool(k, p, d, dim=dim)

    def _window_fill(self, dtype: torch.dtype) -> float:
        """Return what stands on padding."""
        raise TypeError(f"{type(self).__name__} has no value for padding of {dtype}")

    def _make_plan(self, tables: Sequence[Table]) -> _PoolPlan:
        (table,) = tables
        cuts = table.cuts(self.P_x)
        plan = halo.plan(
            cuts, index_in(self.P_x), self.kernel_size, self.stride, self.padding, self.dilation,
            fill=self._window_fill(table.dtype(self.P_x)), ceil_mode=self.ceil_mode,
        )  # fmt: skip
        return _PoolPlan(plan, tuple(own[-1] for own in cuts[2:]))


class _MaxPool(_Pool):
    def __init__(
        self,
        P_x: Partition,
        kernel_size: Size,
        stride: Size | None = None,
        padding: Size = 0,
        dilation: Size = 1,
        return_indices: bool = False,
        ceil_mode: bool = False,
    ) -> None:
        super().__init__(P_x, kernel_size, stride, padding, dilation)
        self.return_indices = return_indices
        self.ceil_mode = ceil_mode

    def _window_fill(self, dtype: torch.dtype) -> float:
        return lowest(dtype)

    def forward(self, input: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Return this rank's share; with `return_indices` also flat indices in the whole image."""
        x = input
        if not self._takes_part:
            outside = self._outside(x)
            return (outside, outside.long()) if self.return_indices else outside
        window = self._window(x)
        plan = self._plan.halo
        if 0 in plan.output_shape:
            empty = _tied_empty(window, plan.output_shape)
            return (empty, empty.long()) if self.return_indices else empty
        numbers = self.kernel_size, self.stride, (0,) * self.dims, self.dilation, False
        if self.dims > 1 and is_plain(window):
            pooled, indices = Pool.apply(window, f"max_pool{self.dims}d", numbers)
        else:
            pooled, indices = _MAX[self.dims](window, *numbers, return_indices=True)
        if plan.has_fill and (self.return_indices or pooled.requires_grad):
            lead = leading_fill(
                plan, range(self.dims), self._plan.global_space, self.stride, self.padding,
                self.dilation,
            )  # fmt: skip
            pooled, indices = off_padding(window, pooled, indices, plan.fill, lead)
        return (pooled, self._global_indices(indices)) if self.return_indices else pooled

    def _global_indices(self, indices: Tensor) -> Tensor:
        """Turn flat indices in the window into flat indices in the whole image."""
        plan, sizes = self._plan.halo, self._plan.global_space
        total = torch.zeros_like(indices)
        rest = indices
        weight = 1
        for i in reversed(range(self.dims)):
            width = plan.window_shape[i + 2]
            first = plan.output_start[i + 2] * self.stride[i] - self.padding[i]
            total += (rest % width + first) * weight
            rest = rest // width
            weight *= sizes[i]
        return total


class _AvgPool(_Pool):
    def __init__(
        self,
        P_x: Partition,
        kernel_size: Size,
        stride: Size | None = None,
        padding: Size = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> None:
        super().__init__(P_x, kernel_size, stride, padding, 1)
        self.ceil_mode = ceil_mode
        self.count_include_pad = count_include_pad
        self.divisor_override = divisor_override
        if divisor_override == 0:
            raise PartitionError.because(
                f"{type(self).__name__}(divisor_override=0)", hint="a number other than 0, or None"
            )

    def _window_fill(self, dtype: torch.dtype) -> float:
        if not dtype.is_floating_point and dtype != torch.int64:
            raise PartitionError.because(
                f"{type(self).__name__} of {dtype}",
                "averages are of floating dtypes, or of int64 and rounded towards 0",
                None,
                "x.float()",
            )
        return 0.0

    def forward(self, input: Tensor) -> Tensor:
        """Return this rank's share of the averages."""
        x = input
        if not self._takes_part:
            return self._outside(x)
        window = self._window(x)
        plan = self._plan.halo
        if 0 in plan.output_shape:
            return _tied_empty(window, plan.output_shape)
        if self.divisor_override is not None:
            return self._means(window, self.divisor_override)
        counts, full = self._counts(), math.prod(self.kernel_size)
        if bool((counts == full).all()):
            return self._means(window)
        if not window.is_floating_point():
            sums = self._integer_sums(window)
            return torch.div(sums, counts.to(sums), rounding_mode="trunc")
        means = self._means(window)
        return means * (full / counts).to(means)

    def _means(self, window: Tensor, divisor: int | None = None) -> Tensor:
        """Return sums over windows, by the size of a window or another number."""
        if self.dims == 1:  # lines have no divisor of their own
            return F.avg_pool1d(window, self.kernel_size, self.stride)
        numbers = self.kernel_size, self.stride, (0,) * self.dims, False, True, divisor
        if is_plain(window):
            return Pool.apply(window, f"avg_pool{self.dims}d", numbers)[0]
        return (F.avg_pool2d if self.dims == 2 else F.avg_pool3d)(window, *numbers)

    def _integer_sums(self, window: Tensor) -> Tensor:
        if self.dims > 1:
            return self._means(window, 1)
        kernel, stride = (1, *self.kernel_size), (1, *self.stride)
        return F.avg_pool2d(window.unsqueeze(2), kernel, stride, divisor_override=1).squeeze(2)

    def _counts(self) -> Tensor:
        """Return the number of points under each output of this rank's share."""
        plan = self._plan.halo
        counts = torch.ones((1,) * self.dims, dtype=torch.int64)
        for i in range(self.dims):
            start = plan.output_start[i + 2]
            own = pool_counts(
                start, start + plan.output_shape[i + 2], self._plan.global_space[i],
                self.kernel_size[i], self.stride[i], self.padding[i],
                count_include_pad=self.count_include_pad,
            )  # fmt: skip
            shape = [1] * self.dims
            shape[i] = -1
            counts = counts * torch.tensor(own).reshape(shape)
        return counts


def _tied_empty(window: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a share without elements that still runs the window's backward."""
    zero = window.sum() * 0 if window.numel() else window.sum()
    return zero.expand(tuple(shape))


class DistributedMaxPool1d(_MaxPool):
    """`torch.nn.MaxPool1d` of a split tensor `(N, C, L)`."""

    dims = 1


class DistributedMaxPool2d(_MaxPool):
    """`torch.nn.MaxPool2d` of a split tensor `(N, C, H, W)`."""

    dims = 2


class DistributedMaxPool3d(_MaxPool):
    """`torch.nn.MaxPool3d` of a split tensor `(N, C, D, H, W)`."""

    dims = 3


class DistributedAvgPool1d(_AvgPool):
    """`torch.nn.AvgPool1d` of a split tensor `(N, C, L)`."""

    dims = 1

    def __init__(
        self,
        P_x: Partition,
        kernel_size: Size,
        stride: Size | None = None,
        padding: Size = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
    ) -> None:
        super().__init__(P_x, kernel_size, stride, padding, ceil_mode, count_include_pad)


class DistributedAvgPool2d(_AvgPool):
    """`torch.nn.AvgPool2d` of a split tensor `(N, C, H, W)`."""

    dims = 2


class DistributedAvgPool3d(_AvgPool):
    """`torch.nn.AvgPool3d` of a split tensor `(N, C, D, H, W)`."""

    dims = 3
