"""Pooling of blocks: halos from neighbours, then torch's own kernel, and no window is kept.

Along cut dims a window brings its padding with it; along the others torch pads. Both the rules and
the layers make a `PoolPlan` from the cuts of the input and let it pool the own block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from unisono import torch_private as private
from unisono.accelerator import copied_once
from unisono.comm import Communicator
from unisono.comm.groups import when_forgotten
from unisono.nn.precision import is_plain
from unisono.nn.split_tensors.rules import rule
from unisono.nn.split_tensors.tensor import Cut, Cuts, Grid, Split, like
from unisono.nn.split_tensors.windows import cut_space, where
from unisono.operators.halo import HaloExchangeMap, HaloOnGroup
from unisono.topology import halo
from unisono.topology.window import check_pool, output_length, per_dim, pool_counts


class Pool(torch.autograd.Function):
    """Pooling that keeps which points are largest, or nothing, where torch keeps the windows."""

    @staticmethod
    def forward(
        ctx: Any, window: Tensor, name: str, settings: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor | None]:
        """Return what torch's function of that name does, and the places of the largest points."""
        ctx.call = name, settings, window.shape
        if name.startswith("avg"):
            return getattr(F, name)(window, *settings), None
        y, indices = getattr(F, name)(window, *settings, return_indices=True)
        ctx.save_for_backward(indices)
        ctx.mark_non_differentiable(indices)
        return y, indices

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the windows."""
        (name, settings, shape), kept = ctx.call, ctx.saved_tensors
        undo = getattr(
            torch.ops.aten, f"{name}_with_indices_backward" if kept else f"{name}_backward"
        )
        # Of the windows only the shape is read.
        return undo(grads[0], grads[0].new_empty(shape), *settings, *kept), None, None


@dataclass(frozen=True)
class PoolNumbers:
    """A pooling of the whole tensor."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    ceil_mode: bool
    is_mean: bool
    count_include_pad: bool = True
    divisor: int | None = None

    def length(self, i: int, size: int) -> int:
        """Return the length of the result in the i-th dim in space."""
        k, s, p, d = self.kernel[i], self.stride[i], self.padding[i], self.dilation[i]
        return output_length(size, k, s, p, d, self.ceil_mode)

    def counts(self, i: int, start: int, stop: int, length: int) -> Tensor:
        """Return how many points are under each output `[start, stop)` of the i-th dim in space."""
        k, s, p = self.kernel[i], self.stride[i], self.padding[i]
        points = pool_counts(start, stop, length, k, s, p, self.count_include_pad)
        return torch.tensor(points).view(-1, *[1] * (len(self.kernel) - 1 - i))


@dataclass(frozen=True, eq=False)
class PoolPlan:
    """How one rank pools its block."""

    exchange: HaloOnGroup
    settings: tuple[Any, ...]
    """What torch's function takes after the window."""
    shape: tuple[int, ...]
    """Of the own share."""
    is_mean: bool
    lead: Tensor | None
    """How far behind the first point of each output the first one of the tensor lies, in a flat
    window; None where padding never comes first."""
    factor: Tensor | None
    """Of means where windows hang over the ends of the tensor; of integers, divisor of the sums."""
    image: tuple[tuple[int, int], ...]
    """For each dim in space, where the window begins in the tensor, and the size of that."""

    def pooled(self, x: Tensor, *, wants_indices: bool = False) -> tuple[Tensor, Any]:
        """Return the own share of the result, and flat places in the image of the largest points.

        Args:
            x: own block.
            wants_indices: the places are only right if they are asked for.
        """
        plan = self.exchange.halo
        window = x if plan.is_identity else HaloExchangeMap.apply(x, self.exchange)
        if 0 in self.shape:  # no point, but the backward of the window runs as elsewhere
            empty = window.sum().to(window.dtype).expand(self.shape)
            return empty, empty.long()
        name = f"{'avg' if self.is_mean else 'max'}_pool{len(self.image)}d"
        keeps_less = len(self.image) > 1 and is_plain(window)
        if not self.is_mean:
            y, indices = (
                Pool.apply(window, name, self.settings)
                if keeps_less
                else getattr(F, name)(window, *self.settings, return_indices=True)
            )
            if self.lead is not None and (wants_indices or y.requires_grad):
                y, indices = self._off_padding(window, y, indices, self.lead)
            return y, self._in_image(indices) if wants_indices else None
        if keeps_less:
            y, _ = Pool.apply(window, name, self.settings)
        else:
            y = _mean(name, window, self.settings)
        if self.factor is None:
            return y, None
        factor = copied_once(self.factor, y.device, y.dtype)
        if y.is_floating_point():
            return y * factor, None
        return torch.div(y, factor, rounding_mode="trunc"), None

    def _off_padding(
        self, window: Tensor, pooled: Tensor, indices: Tensor, lead: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Give what padding has won to the first point of the tensor, as torch does.

        Padding wins only where all points are as low as it is; values stay, gradients move.
        """
        low = pooled == self.exchange.halo.fill
        # To look at them is cheap on a CPU, and stops the host on an accelerator.
        is_seen = not torch.compiler.is_compiling() and not private.transforms_active()
        if is_seen and low.device.type == "cpu" and not bool(low.any()):
            return pooled, indices
        indices = torch.where(low, indices + copied_once(lead, indices.device), indices)
        points = window.flatten(2).gather(2, indices.flatten(2)).reshape(pooled.shape)
        return torch.where(low, points, pooled), indices

    def _in_image(self, indices: Tensor) -> Tensor:
        """Turn flat places in the window into flat places in the whole image."""
        total, rest, weight = torch.zeros_like(indices), indices, 1
        widths = self.exchange.halo.window_shape[2:]
        for width, (first, size) in zip(reversed(widths), reversed(self.image), strict=True):
            total += (rest % width + first) * weight
            rest, weight = rest // width, weight * size
        return total


def _mean(name: str, window: Tensor, settings: tuple[Any, ...]) -> Tensor:
    """Return torch's averages; lines have no divisor of their own, so they are taken as images."""
    if name != "avg_pool1d":
        return getattr(F, name)(window, *settings)
    if settings[-1] is None:
        return F.avg_pool1d(window, *settings[:-1])
    (k,), (s,), (p,), *rest = settings
    return F.avg_pool2d(window.unsqueeze(2), (1, k), (1, s), (0, p), *rest).squeeze(2)


def pool_plan(
    cuts: Sequence[Sequence[int]],
    index: Sequence[int],
    comm: Communicator,
    ranks: tuple[int, ...] | None,
    numbers: PoolNumbers,
    dtype: torch.dtype,
) -> PoolPlan:
    """Return the plan of a rank.

    Args:
        cuts: for each dim, batch and channels first, the cuts of the input.
        index: own place in each dim.
        comm: the ranks that exchange halos.
        ranks: rank of `comm` for each rank of the grid of cuts; None: the same.
        numbers: of the pooling.
        dtype: of the input.
    """
    n, sizes = numbers, [own[-1] for own in cuts[2:]]
    is_cut = [len(own) > 2 for own in cuts[2:]]
    k, s, p, d = (
        [number if cut else other for number, cut in zip(each, is_cut, strict=True)]
        for each, other in ((n.kernel, 1), (n.stride, 1), (n.padding, 0), (n.dilation, 1))
    )
    fill = 0.0
    if not n.is_mean:
        fill = -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min
    plan = halo.plan(cuts, index, k, s, p, d, fill=fill, ceil_mode=n.ceil_mode)
    starts, shape = plan.output_start[2:], list(plan.output_shape)
    lead, exists = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.bool)
    factor, counts = torch.ones(1, dtype=torch.float64), torch.ones(1, dtype=torch.int64)
    for i, size in enumerate(sizes):
        if not is_cut[i]:
            shape[i + 2] = n.length(i, size)
        stop = starts[i] + shape[i + 2]
        if n.is_mean:
            points = n.counts(i, starts[i], stop, size)
            counts = counts * points
            factor = factor * n.kernel[i] / points if is_cut[i] else factor
        elif is_cut[i]:
            begin = torch.arange(starts[i], stop) * n.stride[i] - n.padding[i]
            skipped = -(begin.clamp(max=0) // n.dilation[i]) * n.dilation[i]  # rounded up
            form = (-1, *[1] * (len(sizes) - 1 - i))
            exists = exists & (begin + skipped < size).view(form)
            lead = lead + (skipped * math.prod(plan.window_shape[i + 3 :])).view(form)
    lead = lead * exists
    # Along cut dims torch sees windows that are full of points. Those that hang over the ends of
    # the tensor are means of fewer; of integers, sums are divided, once.
    is_full = n.divisor is not None or bool((factor == 1).all())
    left = tuple(0 if cut else p for p, cut in zip(n.padding, is_cut, strict=True))
    last: tuple[Any, ...] = (n.dilation, n.ceil_mode)
    if n.is_mean:
        is_summed = not is_full and not dtype.is_floating_point
        last = n.ceil_mode, n.count_include_pad, 1 if is_summed else n.divisor
        factor = counts if is_summed else factor
    return PoolPlan(
        HaloOnGroup(comm, plan, ranks, fill),
        (n.kernel, n.stride, left, *last),
        tuple(shape),
        n.is_mean,
        lead if bool(lead.any()) else None,
        None if is_full or not n.is_mean else factor,
        tuple(
            (start * s - p if cut else 0, size)
            for start, s, p, cut, size in zip(
                starts, n.stride, n.padding, is_cut, sizes, strict=True
            )
        ),
    )


# -- the rules -----------------------------------------------------------------------------------


@rule("max_pool1d", "max_pool2d", "max_pool3d", "max_pool1d_with_indices",
      "max_pool2d_with_indices", "max_pool3d_with_indices")  # fmt: skip
def _max_pool(
    func: Callable[..., Any],
    input: Split,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    wants_indices = return_indices or func.__name__.endswith("indices")
    numbers = _pool_numbers(func, kernel_size, stride, padding, dilation)
    y, indices = _pooled(input, PoolNumbers(*numbers, ceil_mode, is_mean=False), wants_indices)
    return (y, indices) if wants_indices else y


@rule("avg_pool1d", "avg_pool2d", "avg_pool3d")
def _avg_pool(
    func: Callable[..., Any],
    input: Split,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    numbers = _pool_numbers(func, kernel_size, stride, padding, 1)
    means = ceil_mode, True, count_include_pad, divisor_override
    return _pooled(input, PoolNumbers(*numbers, *means))[0]


def _pool_numbers(
    func: Callable[..., Any], kernel_size: Any, stride: Any, padding: Any, dilation: Any
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return kernel, stride, padding and dilation of each dim."""
    count = int(func.__name__[8])
    kernel = per_dim(kernel_size, count, "kernel_size")
    steps = kernel if stride in (None, [], ()) else per_dim(stride, count, "stride")
    pads, spread = per_dim(padding, count, "padding"), per_dim(dilation, count, "dilation")
    for k, p, d in zip(kernel, pads, spread, strict=True):
        check_pool(k, p, d)
    return kernel, steps, pads, spread


def _pooled(x: Split, numbers: PoolNumbers, wants_indices: bool = False) -> tuple[Tensor, Any]:
    count = len(numbers.kernel)
    cuts, plan = _pool_plan(x.local.shape, *where(x, count), numbers, x.dtype)
    is_single = x.ndim == count + 1
    local = x.local[None] if is_single else x.local
    y, indices = plan.pooled(local, wants_indices=wants_indices)
    results = [like(x, t[0] if is_single else t, cuts) for t in (y, indices) if t is not None]
    return results[0], results[-1]


@lru_cache(4096)
def _pool_plan(
    shape: Sequence[int],
    cuts: tuple[tuple[int, Cut], ...],
    places: tuple[int, ...],
    grid: Grid | None,
    keeps_empty: bool,
    numbers: PoolNumbers,
    dtype: torch.dtype,
) -> tuple[Cuts, PoolPlan]:
    """Return how the result is cut, and the plan; see `_conv_plan`."""
    count = len(numbers.kernel)
    bounds, index, later = cut_space(shape, cuts, places, keeps_empty, count, numbers.length)
    comm, ranks = grid or (cuts[0][1].comm, None)
    return later, pool_plan(bounds, index, comm, ranks, numbers, dtype)


when_forgotten(_pool_plan.cache_clear)
