"""Rules for normalisation: statistics of all ranks in one meeting, and only the input kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unisono.comm import Communicator
from unisono.nn.split_tensors.blocks import fitted
from unisono.nn.split_tensors.reductions import added
from unisono.nn.split_tensors.tensor import (
    Cut,
    NeedsWhole,
    NoRule,
    Run,
    Split,
    like,
    own_copy,
    rule,
)
from unisono.operators import copy, sum_to_replicated

_LARGE = 1 << 15
"""Elements from which on moments are taken in two passes."""


class _Normalize(torch.autograd.Function):
    """`(x - mean) / sqrt(var + eps) * weight + bias`, with mean and var over dims and ranks.

    Keeps its input alone, as torch's own norms do; written in single operations, autograd would
    keep three tensors of its size.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        dims: list[int],
        count: int,
        comm: Communicator | None,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        mean, variance = _statistics(wide, dims, comm)
        scale = torch.rsqrt(variance + eps)
        if _kernel_serves(x, dims):
            own = _flat(weight), _flat(bias)
            y = F.batch_norm(x, mean.flatten(), variance.flatten(), *own, False, 0.0, eps)
        else:
            y = (wide - mean).mul_(scale)
            y = y if weight is None else y.mul_(weight)
            y = y if bias is None else y.add_(bias)
        ctx.save_for_backward(x, weight, bias, mean, scale, variance)
        ctx.settings = dims, count, comm, eps
        ctx.mark_non_differentiable(mean, variance)
        return y.to(x.dtype), mean, variance

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, bias, mean, scale, variance = ctx.saved_tensors
        dims, count, comm, eps = ctx.settings
        if torch.is_grad_enabled():  # a derivative of this is wanted: let autograd write it
            given = [t for t in (x, weight, bias) if t is not None and t.requires_grad]
            y = _composed(x, weight, bias, dims, count, comm, eps)
            grads = iter(torch.autograd.grad(y, given, dy, create_graph=True))
            held = (t is not None and t.requires_grad for t in (x, weight, bias))
            return *[next(grads) if is_held else None for is_held in held], None, None, None, None
        wanted = ctx.needs_input_grad[:3]
        if _kernel_serves(x, dims):
            grads = _by_kernel(dy, x, weight, (mean, variance, scale), eps, wanted[0], comm, count)
            kept = (g if is_wanted else None for g, is_wanted in zip(grads, wanted, strict=True))
            return *kept, None, None, None, None
        wide, slope = x.to(mean.dtype), dy.to(mean.dtype)
        normal = (wide - mean) * scale
        dweight = _summed_like(slope * normal, weight) if wanted[1] else None
        dbias = _summed_like(slope, bias) if wanted[2] else None
        dx = None
        if wanted[0]:
            if weight is not None:
                slope = slope * weight
            sums = torch.stack([slope.sum(dims, True), (slope * normal).sum(dims, True)])
            if comm is not None:
                sums = comm.all_reduce(sums)
            sums /= count
            dx = ((slope - sums[0] - normal * sums[1]) * scale).to(x.dtype)
        return dx, dweight, dbias, None, None, None, None


def _kernel_serves(x: Tensor, dims: list[int]) -> bool:
    """Whether the kernels of torch's batch norm do it: statistics of channels, on a CPU."""
    of_channels = len(dims) == x.ndim - 1 and 1 not in dims
    return of_channels and x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)


def _flat(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.flatten()


def _by_kernel(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    statistics: tuple[Tensor, Tensor, Tensor],
    eps: float,
    needs_x: bool,
    comm: Communicator | None,
    count: int,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return the gradients of a norm of channels: sums in one pass, and that of `x` in two."""
    mean, variance, scale = statistics
    _, dweight, dbias = torch.ops.aten.native_batch_norm_backward(
        dy, x, None, mean.flatten(), variance.flatten(), None, None, False, eps, [False, True, True]
    )
    dweight, dbias = dweight.view(mean.shape), dbias.view(mean.shape)
    if not needs_x:
        return None, dweight, dbias
    sums = torch.stack([dbias, dweight])
    if comm is not None:
        sums = comm.all_reduce(sums)
    factor = scale if weight is None else scale * weight
    of_x = -factor * scale * sums[1] / count
    shift = -factor * sums[0] / count - of_x * mean
    # x * of_x + shift, in one pass over memory.
    zero, one = torch.zeros_like(mean).flatten(), torch.ones_like(mean).flatten()
    dx = F.batch_norm(x, zero, one, of_x.flatten(), shift.flatten(), False, 0.0, 0.0)
    return dx.addcmul_(dy, factor), dweight, dbias


def _statistics(x: Tensor, dims: list[int], comm: Communicator | None) -> tuple[Tensor, Tensor]:
    """Return mean and variance over dims and ranks: each rank's own, joined in one meeting."""
    count = x.new_full((), float(math.prod(x.shape[d] for d in dims)))
    mean, squares = own_moments(x, dims)
    if comm is not None:
        counts = count.expand_as(mean)
        counts, means, parts = comm.all_gather(torch.stack([counts, mean, squares])[None]).unbind(1)
        count = counts.sum(0)
        mean = (counts * means).sum(0) / count
        squares = (parts + counts * (means - mean).square()).sum(0)
    return mean, squares / count


def own_moments(x: Tensor, dims: list[int]) -> tuple[Tensor, Tensor]:
    """Return mean and sum of squared deviations over dims, of size 1 then. Not differentiable.

    torch's kernel is one call; on large tensors two plain sums take a quarter of its time.
    """
    if x.numel() < _LARGE and _kernel_serves(x, dims):
        mean, variance = torch.batch_norm_update_stats(x, None, None, 0.0)
        shape = [1, -1] + [1] * (x.ndim - 2)
        return mean.view(shape), variance.view(shape) * (x.numel() // x.shape[1])
    mean = x.mean(dims, True)
    return mean, (x - mean).square_().sum(dims, True)


def _composed(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, dims: list[int], count: int,
    comm: Communicator | None, eps: float,
) -> Tensor:  # fmt: skip
    """Return the same from operations that autograd differentiates to any order."""

    def mean_of(t: Tensor) -> Tensor:
        total = t.sum(dims, True)
        if comm is not None:
            total = copy(sum_to_replicated(total, comm=comm), comm=comm)
        return total / count

    centred = x - mean_of(x)
    y = centred * torch.rsqrt(mean_of(centred.square()) + eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _summed_like(x: Tensor, other: Tensor) -> Tensor:
    """Return `x` summed over the dims along which `other` was broadcast."""
    return x.sum_to_size(other.shape).to(other.dtype)


def _normalized(
    local: Tensor,
    dims: list[int],
    count: int,
    cuts: Sequence[Cut],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    run: Run,
) -> tuple[Tensor, Tensor, Tensor]:
    return _Normalize.apply(local, weight, bias, dims, count, run.ranks_of(cuts), eps)


def _per_channel(t: Tensor | None, x: Split, shape: Sequence[int]) -> Tensor | None:
    return None if t is None else own_copy(t, x.cuts.values(), x.run).view(shape)


@rule("batch_norm")
def _batch_norm(
    func: Callable[..., Any],
    input: Split,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    x = input
    if 1 in x.cuts:
        raise NeedsWhole(1, "channels are cut")
    if not training:
        own = [None if t is None else own_copy(t, x.cuts.values(), x.run) for t in (weight, bias)]
        return like(x, func(x.local, running_mean, running_var, *own, False, momentum, eps))
    dims = [d for d in range(x.ndim) if d != 1]
    count = x.numel() // x.shape[1]
    if count == 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got {list(x.shape)}"
        )
    shape = [1, -1] + [1] * (x.ndim - 2)
    w, b = _per_channel(weight, x, shape), _per_channel(bias, x, shape)
    y, mean, variance = _normalized(x.local, dims, count, [*x.cuts.values()], w, b, eps, x.run)
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            unbiased = variance.flatten() * (count / (count - 1))
            running_mean.lerp_(mean.flatten().to(running_mean.dtype), momentum)
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    return like(x, y)


@rule("instance_norm")
def _instance_norm(
    func: Callable[..., Any],
    input: Split,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    x = input
    if 1 in x.cuts:
        raise NeedsWhole(1, "channels are cut")
    inside = [cut for d, cut in x.cuts.items() if d >= 2]
    if not use_input_stats:
        own = [None if t is None else own_copy(t, x.cuts.values(), x.run) for t in (weight, bias)]
        return like(x, func(x.local, running_mean, running_var, *own, False, momentum, eps))
    dims = list(range(2, x.ndim))
    count = math.prod(x.shape[2:])
    if count == 1:
        raise ValueError(f"more than 1 point per channel is needed to train, got {list(x.shape)}")
    # Each channel of each sample is a channel of its own; the batch has one sample.
    shape, samples = [1, -1] + [1] * (x.ndim - 2), x.local.shape[0]
    w, b = (
        None if t is None else own_copy(t, x.cuts.values(), x.run).repeat(samples).view(shape)
        for t in (weight, bias)
    )
    folded = x.local.reshape(1, -1, *x.local.shape[2:])
    y, mean, variance = _normalized(folded, [0, *dims], count, inside, w, b, eps, x.run)
    y = y.view(x.local.shape)
    if running_mean is not None and running_var is not None:
        over_batch = [cut for d, cut in x.cuts.items() if d == 0]
        with torch.no_grad():
            both = torch.stack([mean, variance * (count / (count - 1))])
            both = added(both.view(2, -1, x.shape[1]).sum(1), over_batch, x.run) / x.shape[0]
            running_mean.lerp_(both[0].to(running_mean.dtype), momentum)
            running_var.lerp_(both[1].to(running_var.dtype), momentum)
    return like(x, y)


@rule("group_norm")
def _group_norm(
    func: Callable[..., Any],
    input: Split,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    x = input
    if 1 in x.cuts:
        raise NeedsWhole(1, "channels are cut")
    inside = [cut for d, cut in x.cuts.items() if d >= 2]
    if not inside:
        own = [None if t is None else own_copy(t, x.cuts.values(), x.run) for t in (weight, bias)]
        return like(x, func(x.local, num_groups, *own, eps))
    grouped = x.local.unflatten(1, (num_groups, -1))
    shape = [1, num_groups, -1] + [1] * (x.ndim - 2)
    w, b = _per_channel(weight, x, shape), _per_channel(bias, x, shape)
    count = x.numel() // x.shape[0] // num_groups
    y, _, _ = _normalized(grouped, list(range(2, grouped.ndim)), count, inside, w, b, eps, x.run)
    return like(x, y.flatten(1, 2))


@rule("layer_norm")
def _layer_norm(
    func: Callable[..., Any],
    input: Split,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    x = input
    first = x.ndim - len(normalized_shape)
    inside = {d: cut for d, cut in x.cuts.items() if d >= first}
    if not inside:
        own = [None if t is None else own_copy(t, x.cuts.values(), x.run) for t in (weight, bias)]
        return like(x, func(x.local, normalized_shape, *own, eps))
    if any(cut.outer != 1 for cut in inside.values()):
        raise NoRule("the cut lies inside merged dims")
    layout = {d - x.ndim: cut for d, cut in x.cuts.items()}
    w, b = (None if t is None else fitted(t, layout, x.run) for t in (weight, bias))
    dims, count = list(range(first, x.ndim)), math.prod(normalized_shape)
    y, _, _ = _normalized(x.local, dims, count, [*inside.values()], w, b, eps, x.run)
    return like(x, y)


@rule("rms_norm")
def _rms_norm(
    func: Callable[..., Any],
    input: Split,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    for dim in range(input.ndim - len(normalized_shape), input.ndim):
        if dim in input.cuts:
            raise NeedsWhole(dim, "over the cut")
    own = None if weight is None else own_copy(weight, input.cuts.values(), input.run)
    return like(input, func(input.local, normalized_shape, own, eps))
