"""Rules for normalisation: statistics of all ranks in one meeting, and only the input kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unisono.comm import Communicator
from unisono.errors import UnisonoError
from unisono.nn.precision import as_autocast, is_plain, wide
from unisono.nn.split_tensors.blocks import fitted, placed, recut
from unisono.nn.split_tensors.reductions import added
from unisono.nn.split_tensors.rules import rule
from unisono.nn.split_tensors.tensor import Cut, NeedsWhole, NoRule, Split, like
from unisono.operators import all_gather, all_sum_reduce
from unisono.operators.gradients import summed_gradients
from unisono.operators.linear import identity, slopes
from unisono.topology.decompose import split_sizes

_LARGE = 1 << 15
"""Elements from which on moments are taken in two passes."""


@dataclass(frozen=True)
class Over:
    """What one statistic is taken over."""

    dims: tuple[int, ...]
    """Dims of the block, of size 1 in the statistics."""
    count: int
    """Values of all ranks behind one of them."""
    comm: Communicator | None
    """Ranks that share them; None for this one alone."""

    def is_per_channel(self, x: Tensor) -> bool:
        """Whether the kernels of torch's batch norm do it: each channel has its statistics."""
        return len(self.dims) == x.ndim - 1 and 1 not in self.dims

    def summed(self, x: Tensor) -> Tensor:
        """Return the sum over ranks. Not differentiable."""
        return x if self.comm is None or self.comm.size == 1 else self.comm.all_reduce(x)


class Normalize(torch.autograd.Function):
    """`(x - mean) / sqrt(var + eps) * weight + bias`, with mean and var over dims and ranks.

    Keeps its input alone, as torch's own norms do; written in single operations, autograd would
    keep three tensors of its size. `is_summed`: weight and bias, one per channel, get the gradients
    of all ranks, in the message that is sent anyway.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        over: Over,
        eps: float,
        is_summed: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the block, normalised; mean and variance of all ranks."""
        values = wide(x)
        mean, variance = statistics(values, over)
        if x.numel() == 0:
            y = x.clone()
        elif over.is_per_channel(x):
            own = _flat(weight, mean), _flat(bias, mean)
            y = F.batch_norm(x, mean.flatten(), variance.flatten(), *own, False, 0.0, eps)
        else:
            y = (values - mean).mul_(torch.rsqrt(variance + eps))
            y = y if weight is None else y.mul_(weight)
            y = y if bias is None else y.add_(bias)
        ctx.save_for_backward(x, weight, bias, mean, variance)
        ctx.settings = over, eps, is_summed
        ctx.mark_non_differentiable(mean, variance)
        return y.to(x.dtype), mean, variance

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the gradients of block, weight and bias."""
        x, weight, bias, mean, variance = ctx.saved_tensors
        over, eps, is_summed = ctx.settings
        needs, rest = ctx.needs_input_grad[:3], (None, None, None)
        if torch.is_grad_enabled():  # a derivative of this is needed: let autograd write it

            def forward(x: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
                if is_summed and over.comm is not None and w is not None:
                    w, *rest_of = summed_gradients(over.comm, *[t for t in (w, b) if t is not None])
                    b = rest_of[0] if rest_of else None
                return composed(x, w, b, over, eps)

            return *slopes(forward, (x, weight, bias), needs, dy), *rest
        x, slope, scale = wide(x), wide(dy), torch.rsqrt(variance + eps)
        if not over.is_per_channel(x):
            dx, dw, db = _by_elements(slope, x, weight, bias, mean, scale, over, needs[0])
            return None if dx is None else dx.to(dy.dtype), dw, db, *rest
        own = torch.zeros(2, mean.numel(), dtype=mean.dtype, device=mean.device)
        if x.numel():
            _, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
                slope, x, None, mean.flatten(), variance.flatten(), None, None, False, eps,
                [False, True, True],
            )  # fmt: skip
            own = torch.stack([of_bias, of_weight])
        total = over.summed(own) if needs[0] or is_summed else own
        dx = None
        if needs[0] and x.numel():
            # dx = factor * (dy - total[0] / n - normalised * total[1] / n), in two passes
            factor = scale if weight is None else scale * weight.view(scale.shape)
            shift, of_x = -factor.flatten() * total / over.count
            stats = mean.flatten(), variance.flatten()
            dx = F.batch_norm(x, *stats, of_x, shift, False, 0.0, eps).addcmul_(slope, factor)
        elif needs[0]:
            dx = torch.zeros_like(x)
        db, dw = (
            t.view(like.shape).to(like.dtype) if like is not None and needed else None
            for t, like, needed in zip(
                total if is_summed else own, (bias, weight), needs[:0:-1], strict=True
            )
        )
        return None if dx is None else dx.to(dy.dtype), dw, db, *rest


def _flat(t: Tensor | None, other: Tensor) -> Tensor | None:
    return None if t is None else t.flatten().to(other.dtype)  # 16-bit values lose no digits


def _by_elements(
    slope: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    scale: Tensor,
    over: Over,
    needs_x: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients where scale and shift belong to elements, not to statistics."""
    normal = (x - mean) * scale
    dw = (slope * normal).sum_to_size(weight.shape).to(weight.dtype) if weight is not None else None
    db = slope.sum_to_size(bias.shape).to(bias.dtype) if bias is not None else None
    dx = None
    if needs_x:
        slope = slope if weight is None else slope * weight
        own = torch.stack([slope.sum(over.dims, True), (slope * normal).sum(over.dims, True)])
        of_mean, of_scale = over.summed(own) / max(over.count, 1)
        dx = (slope - of_mean - normal * of_scale) * scale
    return dx, dw, db


def statistics(x: Tensor, over: Over) -> tuple[Tensor, Tensor]:
    """Return mean and variance over dims and ranks: each rank's own, joined in one meeting."""
    mean, squares = own_moments(x, over.dims)
    if over.comm is not None and over.comm.size > 1:
        own = mean.new_full(mean.shape, x.numel() / max(mean.numel(), 1))
        sizes = [1] * over.comm.size
        rows = all_gather(torch.stack([own, mean, squares])[None], 0, sizes, comm=over.comm)
        counts, means, parts = rows.unbind(1)
        mean = (counts * means).sum(0) / max(over.count, 1)
        squares = (parts + counts * (means - mean).square()).sum(0)
    return mean, squares / max(over.count, 1)


def own_moments(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return mean and sum of squared deviations over dims; zeros of nothing. Not differentiable.

    torch's kernel is one call; on large tensors two plain sums take a quarter of its time.
    """
    if x.numel() == 0:
        none = x.sum(dims, True)
        return none, none
    if x.numel() < _LARGE and Over(dims, 0, None).is_per_channel(x) and x.device.type == "cpu":
        mean, variance = torch.batch_norm_update_stats(x, None, None, 0.0)
        shape = [1, -1] + [1] * (x.ndim - 2)
        return mean.view(shape), variance.view(shape) * (x.numel() // x.shape[1])
    mean = x.mean(dims, True)
    return mean, (x - mean).square_().sum(dims, True)


def composed(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, over: Over, eps: float
) -> Tensor:
    """Return the same from operations that autograd differentiates to any order."""

    def mean_of(t: Tensor) -> Tensor:
        total = t.sum(over.dims, True)
        if over.comm is not None:
            total = all_sum_reduce(total, comm=over.comm)
        return total / max(over.count, 1)

    values = wide(x)
    centred = values - mean_of(values)
    y = centred * torch.rsqrt(mean_of(centred.square()) + eps)
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).to(x.dtype)


def normalized(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    over: Over,
    eps: float,
    is_summed: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the block, normalised; mean and variance of all ranks. See `Normalize`."""
    if is_plain(x) or torch.is_autocast_enabled(x.device.type):
        return Normalize.apply(x, weight, bias, over, eps, is_summed)
    with torch.no_grad():
        mean, variance = statistics(wide(x), over)
    return composed(x, weight, bias, over, eps), mean, variance


def by_groups(
    x: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    count: int,
    comm: Communicator | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise each group of own channels in each sample; also return their mean and variance.

    `count` are the values of all ranks in one group, `comm` the ranks that share them.
    """
    samples, channels, *space = x.shape
    ones = [1] * len(space)
    if groups == channels:  # each is a channel of its own, of one sample: torch has kernels for it
        rows, dims, shape = x.reshape(1, samples * channels, *space), (0,), [1, -1, *ones]
        weight, bias = (None if t is None else t.repeat(samples) for t in (weight, bias))
    else:
        rows, dims, shape = x.unflatten(1, (groups, -1)), (), [1, groups, -1, *ones]
    w, b = (None if t is None else t.view(shape) for t in (weight, bias))
    over = Over((*dims, *range(2, rows.ndim)), count, comm)
    y, mean, variance = normalized(rows, w, b, over, eps)
    return y.reshape(x.shape), mean, variance


def rms_normed(x: Tensor, weight: Tensor | None, over: Over, eps: float | None) -> Tensor:
    """Return the block, divided by the root of the mean square over dims and ranks."""
    values = wide(x)
    squares = values.square().sum(over.dims, True)
    if over.comm is not None:
        squares = all_sum_reduce(squares, comm=over.comm)
    least = torch.finfo(values.dtype).eps if eps is None else eps
    y = values * torch.rsqrt(squares / max(over.count, 1) + least)
    return (y if weight is None else y * weight).to(x.dtype)


# -- the rules ------------------------------------------------------------------------------------


Affine = tuple[Tensor | None, Tensor | None]
"""Scale and shift."""


def _channels(x: Split) -> Cut | None:
    """Return the cut of the channels, in one run; None if every rank has all of them."""
    cut = x.cuts.get(1)
    if cut is not None and cut.outer != 1:
        raise NeedsWhole(1, "the cut lies inside merged dims")
    return cut


def _per_channel(x: Split, *affine: Tensor | None) -> Affine:
    """Return scale and shift of own channels, for own work."""
    cut = _channels(x)
    cuts = {} if cut is None else {0: cut}
    rest = [other for dim, other in x.cuts.items() if dim != 1]
    weight, bias = (None if t is None else placed(t, cuts, rest, x.run) for t in affine)
    return weight, bias


def _with_running(func: Callable[..., Any], x: Tensor, *running: Tensor | None) -> Split:
    """Return the input of a norm; raise if no rank could write the running statistics."""
    channels = x.cuts.get(1) if isinstance(x, Split) else None
    for t in running:
        cuts = t.cuts if isinstance(t, Split) else {}
        fits = channels is not None and list(cuts) == [0] and cuts[0].comm == channels.comm
        if cuts and not fits:
            raise UnisonoError.because(
                f"{func.__name__} with running statistics that are split",
                "they would be changed in memory that no rank has",
                None,
                "running_mean.whole(), running_var.whole() before the call",
            )
    if not isinstance(x, Split):
        raise NoRule("a replicated tensor first")
    return x


def _by_running(
    func: Callable[..., Any],
    x: Split,
    running: Sequence[Tensor | None],
    affine: Affine,
    *settings: Any,
) -> Tensor:
    """Return the input, normalised with running statistics."""
    mean, variance = _per_channel(x, *running)
    if x.local.numel():
        return like(x, func(x.local, mean, variance, *affine, *settings))
    # torch takes no empty block; backwards of any order run all the same.
    shape = (1, -1, *(1,) * (x.ndim - 2))
    weight, bias = (None if t is None else t.view(shape) for t in affine)
    y = identity(x.local) if weight is None else x.local * weight
    return like(x, y if bias is None else y + bias)


@torch.no_grad()
def _track(
    x: Split,
    running: Sequence[Tensor | None],
    mean: Tensor,
    variance: Tensor,
    factor: float,
) -> None:
    """Move running statistics towards those of own channels."""
    cut = x.cuts.get(1)
    for kept, new in zip(running, (mean, variance), strict=True):
        if kept is None:
            continue
        target, values = kept, new.flatten()
        if cut is not None:
            shown = Split(values, {0: cut}, x.run)
            if isinstance(kept, Split):
                values = recut(shown, 0, kept.cuts[0].sizes).local
            else:
                values = shown.whole()
        if isinstance(kept, Split):
            target = kept.local
        target.lerp_(values.to(target.dtype), factor)


@rule("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update")
def _native_batch_norm(
    func: Callable[..., Any],
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *args: Any,
) -> Any:
    """Gather what torch changes without a word, unless that is split."""
    _with_running(func, input, *[x for x in args[:2] if isinstance(x, Tensor)])
    raise NoRule("no rule")


@rule("batch_norm")
def _batch_norm(
    func: Callable[..., Any],
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    running = running_mean, running_var
    x = _with_running(func, input, *running)
    if not training:
        affine = _per_channel(x, weight, bias)
        return _by_running(func, x, running, affine, False, momentum, eps)
    count = x.numel() // x.shape[1]
    if count == 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got {list(x.shape)}"
        )
    channels, run = _channels(x), x.run
    # Gradients of scale and shift are summed in the message of the statistics' gradients, unless
    # the network sums those of all its parameters at once.
    is_summed = run.sums_gradients and not run.copies
    if is_summed:
        cuts = {} if channels is None else {0: channels}
        affine = tuple(None if t is None else placed(t, cuts, (), run) for t in (weight, bias))
    else:
        affine = _per_channel(x, weight, bias)
    w, b = (None if t is None else t.view(1, -1, *[1] * (x.ndim - 2)) for t in affine)
    ranks = run.ranks_of([cut for d, cut in x.cuts.items() if d != 1])
    over = Over((0, *range(2, x.ndim)), count, ranks)
    y, mean, variance = normalized(x.local, w, b, over, eps, is_summed)
    _track(x, running, mean, variance * (count / (count - 1)), momentum)
    return like(x, y)


@rule("instance_norm")
def _instance_norm(
    func: Callable[..., Any],
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    running = running_mean, running_var
    x = _with_running(func, input, *running)
    affine = _per_channel(x, weight, bias)
    if not use_input_stats:
        return _by_running(func, x, running, affine, False, momentum, eps)
    count = math.prod(x.shape[2:])
    if count == 1:
        raise ValueError(f"more than 1 point per channel is needed to train, got {list(x.shape)}")
    ranks = x.run.ranks_of([cut for d, cut in x.cuts.items() if d >= 2])
    channels = x.local.shape[1]
    y, mean, variance = by_groups(x.local, channels, *affine, count, ranks, eps)
    if running_mean is not None and running_var is not None and x.shape[0]:
        over_batch = [cut for d, cut in x.cuts.items() if d == 0]
        both = torch.stack([mean, variance * (count / max(count - 1, 1))])
        sums = added(both.view(2, x.local.shape[0], channels).sum(1), over_batch, x.run)
        mean, variance = sums / x.shape[0]
        _track(x, running, mean, variance, momentum)
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
    channels = _channels(x)
    width = max(x.shape[1] // max(num_groups, 1), 1)
    if channels is not None and any(bound % width for bound in channels.bounds):
        if num_groups < channels.comm.size and not x.run.keeps_empty:
            raise NeedsWhole(1, f"channels: {num_groups} groups for {channels.comm.size} ranks")
        groups = split_sizes(num_groups, channels.comm.size)
        moved = recut(x, 1, [width * n for n in groups])
        y: Any = _group_norm(func, moved, num_groups, weight, bias, eps)
        return recut(y, 1, channels.sizes)
    affine = _per_channel(x, weight, bias)
    own_groups = x.local.shape[1] // width
    ranks = x.run.ranks_of([cut for d, cut in x.cuts.items() if d >= 2])
    if ranks is None and x.local.numel():
        return like(x, func(x.local, own_groups, *affine, eps))
    count = math.prod(x.shape[1:]) // num_groups
    local = as_autocast(x.local, torch.group_norm, 1)
    return like(x, by_groups(local, own_groups, *affine, count, ranks, eps)[0])


def _over_last(
    x: Split, normalized_shape: Sequence[int], *affine: Tensor | None
) -> tuple[Over, Affine]:
    """Return what a norm of the last dims is taken over; scale and shift as the block is cut."""
    first = x.ndim - len(normalized_shape)
    if list(x.shape[first:]) != list(normalized_shape):
        raise NoRule("another shape than that of the last dims")
    inside = [cut for d, cut in x.cuts.items() if d >= first]
    if any(cut.outer != 1 for cut in inside):
        raise NoRule("the cut lies inside merged dims")
    layout = {d - x.ndim: cut for d, cut in x.cuts.items()}
    weight, bias = (None if t is None else fitted(t, layout, x.run) for t in affine)
    dims, count = tuple(range(first, x.ndim)), math.prod(normalized_shape)
    return Over(dims, count, x.run.ranks_of(inside)), (weight, bias)


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
    over, affine = _over_last(x, normalized_shape, weight, bias)
    if over.comm is None:
        return like(x, func(x.local, normalized_shape, *affine, eps))
    local = as_autocast(x.local, torch.layer_norm, (1,))
    return like(x, normalized(local, *affine, over, eps)[0])


@rule("rms_norm")
def _rms_norm(
    func: Callable[..., Any],
    input: Split,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    over, (weight_of_block, _) = _over_last(input, normalized_shape, weight, None)
    if over.comm is None:
        return like(input, func(input.local, normalized_shape, weight_of_block, eps))
    local = as_autocast(input.local, torch.rms_norm, (1,))
    return like(input, rms_normed(local, weight_of_block, over, eps))
