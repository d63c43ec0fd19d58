"""Rules for what reads windows: convolution, pooling, padding, interpolation. Halos first."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unisono.nn.layers.conv_space import (
    ConvSettings,
    SpacePlan,
    convolved_in_space,
    space_plan,
)
from unisono.nn.planned import is_plain
from unisono.nn.split_tensors.blocks import balanced, span, window_of
from unisono.nn.split_tensors.tensor import (
    Cut,
    Cuts,
    NeedsWhole,
    NoRule,
    Split,
    call,
    like,
    own_copy,
    resized,
    rule,
    without_runs,
)
from unisono.operators.halo import HaloExchange, HaloOnGroup
from unisono.topology import HaloPlan, halo
from unisono.topology.decompose import split_sizes
from unisono.topology.resample import resample_needed, resample_taps
from unisono.topology.window import (
    output_length,
    padding_pairs,
    per_dim,
    transposed_cover,
    transposed_needed,
)
from unisono.topology.window import window as window_segments

_PAD_MODES = {
    "constant": "zeros",
    "reflect": "reflect",
    "replicate": "replicate",
    "circular": "circular",
}


def _refuse_cut_channels(x: Split, count: int) -> None:
    channels = x.ndim - count - 1
    if channels in x.cuts:
        raise NeedsWhole(channels, "channels are cut")


# -- convolution ----------------------------------------------------------------------------------


@rule("conv1d", "conv2d", "conv3d")
def _conv(
    func: Callable[..., Any],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    if not isinstance(input, Split) or isinstance(weight, Split):
        raise NoRule("a split weight")
    x, count = input, weight.ndim - 2
    _refuse_cut_channels(x, count)
    w = own_copy(weight, x.cuts.values(), x.run)
    b = None if bias is None else own_copy(bias, x.cuts.values(), x.run)
    if all(dim < x.ndim - count for dim in x.cuts):
        return like(x, func(x.local, w, b, stride, padding, dilation, groups))
    numbers = (_fixed(stride), _fixed(padding), _fixed(dilation), groups)
    places = tuple([cut.comm.rank for cut in x.cuts.values()])
    plan = _conv_plan(x.local.shape, tuple(x.cuts.items()), places, weight.shape, numbers)
    local = x.local if x.ndim == count + 2 else x.local[None]
    for exchange in plan.before:
        local = HaloExchange.apply(local, exchange)
    if is_plain(local):
        y = convolved_in_space(local, w, b, plan.space)
    else:
        exchange = plan.space.exchange
        window = local if exchange.halo.is_identity else HaloExchange.apply(local, exchange)
        y = plan.space.settings.convolved(window, w, b, padding=plan.space.padding)
    return like(x, y if x.ndim == count + 2 else y[0], plan.cuts)


def _fixed(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@dataclass(frozen=True)
class _ConvPlan:
    """A convolution of blocks that are cut in space."""

    before: tuple[HaloOnGroup, ...]
    """Windows along all cut dims but the last."""
    space: SpacePlan
    """The rest: its halo may travel while the own block is convolved."""
    cuts: Cuts
    """Of the result."""


@lru_cache(4096)
def _conv_plan(
    shape: Sequence[int],
    cuts: tuple[tuple[int, Cut], ...],
    _: tuple[int, ...],
    weight: Sequence[int],
    numbers: tuple[Any, Any, Any, int],
) -> _ConvPlan:
    """Return the plan of a convolution, given the shape of the own block, its cuts and places.

    Communicators of the same ranks are equal, whichever rank they are seen from (on paper, one
    process sees them from all).
    """
    stride, padding, dilation, groups = numbers
    count, kernel = len(weight) - 2, tuple(weight[2:])
    steps, spread = per_dim(stride, count, "stride"), per_dim(dilation, count, "dilation")
    pads = list(padding_pairs(padding, kernel, steps, spread))
    ahead = len(shape) - count  # dims before those in space
    sizes = [1] * (2 - ahead) + list(shape)
    later = dict(cuts)
    before: list[HaloOnGroup] = []
    in_space = [(dim - ahead, cut) for dim, cut in cuts if dim >= ahead]
    for i, cut in in_space:
        if cut.outer != 1:
            raise NeedsWhole(i + ahead, "the cut lies inside merged dims")
        length = output_length(cut.length, kernel[i], steps[i], pads[i], spread[i])
        if length < cut.comm.size:
            raise NeedsWhole(i + ahead, f"conv: {length} points for {cut.comm.size} ranks")
        later[i + ahead] = resized(cut, split_sizes(length, cut.comm.size))
    for i, cut in in_space:
        bounds: list[Sequence[int]] = [(0, n) for n in sizes]
        bounds[2 + i] = cut.bounds
        index = [0] * len(sizes)
        index[2 + i] = cut.comm.rank
        if i == in_space[-1][0]:
            settings = ConvSettings(
                weight[1] * groups, weight[0], kernel, steps, tuple(pads), spread, groups, "zeros"
            )
            plan = halo.plan(bounds, index, kernel, steps, pads, spread)
            space = space_plan(settings, HaloOnGroup(cut.comm, plan, None, 0.0), "auto")
            if space.cover is None and _reads_all(plan, pads, i):
                left = tuple(0 if j == i else low for j, (low, _) in enumerate(pads))
                plan = _along(i, bounds, index, kernel, steps, pads, spread)
                space = SpacePlan(settings, HaloOnGroup(cut.comm, plan, None, 0.0), None, left)
            return _ConvPlan(tuple(before), space, later)
        plan = _along(i, bounds, index, kernel, steps, pads, spread)
        before.append(HaloOnGroup(cut.comm, plan, None, 0.0))
        sizes[2 + i], pads[i] = plan.window_shape[2 + i], (0, 0)
    raise NoRule("no dim in space is cut")


def _reads_all(plan: HaloPlan, pads: Sequence[tuple[int, int]], i: int) -> bool:
    """Whether a window along dim `i` alone has the messages of the whole one, and torch can pad."""
    return all(
        low == high and parts == (0, stop - start)
        for j, ((low, high), (start, stop), parts) in enumerate(
            zip(pads, plan.own[2:], plan.needed[2:], strict=True)
        )
        if j != i
    )


def _along(
    i: int,
    bounds: Sequence[Sequence[int]],
    index: Sequence[int],
    kernel: Sequence[int],
    steps: Sequence[int],
    pads: Sequence[tuple[int, int]],
    spread: Sequence[int],
) -> HaloPlan:
    """Return the plan of a window along dim `i` in space alone."""
    mine = [j == i for j in range(len(kernel))]
    return halo.plan(
        bounds,
        index,
        [k if own else 1 for k, own in zip(kernel, mine, strict=True)],
        [n if own else 1 for n, own in zip(steps, mine, strict=True)],
        [pair if own else (0, 0) for pair, own in zip(pads, mine, strict=True)],
        [n if own else 1 for n, own in zip(spread, mine, strict=True)],
    )


@rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _conv_transpose(
    func: Callable[..., Any],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Tensor:
    if not isinstance(input, Split) or isinstance(weight, Split):
        raise NoRule("a split weight")
    x, count = input, weight.ndim - 2
    _refuse_cut_channels(x, count)
    kernel, steps = tuple(weight.shape[2:]), per_dim(stride, count, "stride")
    spread = per_dim(dilation, count, "dilation")
    pads = list(per_dim(padding, count, "padding"))
    more = list(per_dim(output_padding, count, "output_padding"))
    local, cuts, trims = x.local, dict(x.cuts), [(0, 0)] * count
    for i in range(count):
        dim = x.ndim - count + i
        if dim not in x.cuts:
            continue
        cut, numbers = without_runs(x, dim), (kernel[i], steps[i], pads[i], spread[i])
        length = (
            (cut.length - 1) * steps[i] - 2 * pads[i] + spread[i] * (kernel[i] - 1) + 1 + more[i]
        )
        out = resized(cut, balanced(length, x, dim, func.__name__))
        needed = [
            transposed_needed(a, b, cut.length, *numbers)
            for a, b in zip(out.bounds, out.bounds[1:], strict=False)
        ]
        if any(a >= b for a, b in needed):
            raise NeedsWhole(dim, "outputs that no input reaches")
        local = window_of(local, dim, cut, [span(a, b) for a, b in needed], 0.0, x)
        first, last = transposed_cover(needed[cut.comm.rank], *numbers)
        low, high = out.bounds[cut.comm.rank : cut.comm.rank + 2]
        trims[i], cuts[dim], pads[i], more[i] = (first - low, high - last), out, 0, 0
    own = own_copy(weight, x.cuts.values(), x.run)
    result = func(local, own, None, steps, pads, more, groups, spread)
    result = F.pad(result, [n for pair in reversed(trims) for n in pair])
    if bias is not None:
        shift = own_copy(bias, x.cuts.values(), x.run)
        result = result + shift.view(-1, *[1] * count)
    return like(x, result, cuts)


# -- pooling --------------------------------------------------------------------------------------


@rule("max_pool1d", "max_pool2d", "max_pool3d")
def _max_pool(
    func: Callable[..., Any],
    input: Split,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor:
    if return_indices:
        raise NoRule("indices")
    return _pooled(func, input, kernel_size, stride, padding, dilation, ceil_mode)


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
    count = int(func.__name__[-2])
    pads = per_dim(padding, count, "padding")
    over = {} if divisor_override is None else {"divisor_override": divisor_override}
    if not any(d >= input.ndim - count for d in input.cuts):
        local = func(
            input.local, kernel_size, stride, padding, ceil_mode, count_include_pad, **over
        )
        return like(input, local)
    if ceil_mode:
        raise NoRule("means over windows of unlike sizes")
    y = _pooled(func, input, kernel_size, stride, padding, 1, False, **over)
    if count_include_pad or not any(pads) or over:
        return y
    # Padding was counted: each window has as many points too many as lie outside of the image.
    kernel = per_dim(kernel_size, count, "kernel_size")
    steps = kernel if stride is None or stride == [] else per_dim(stride, count, "stride")
    for i in range(count):
        dim, n = input.ndim - count + i, input.shape[input.ndim - count + i]
        first = torch.arange(y.shape[dim], dtype=torch.float64) * steps[i] - pads[i]
        inside = (first + kernel[i]).clamp(max=n) - first.clamp(min=0)
        factor = (kernel[i] / inside).to(y.dtype).to(y.device)
        y = call(torch.mul, y, factor.view(-1, *[1] * (count - 1 - i)))
    return y


def _pooled(
    func: Callable[..., Any],
    x: Split,
    kernel_size: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    ceil_mode: bool,
    **more: Any,
) -> Tensor:
    count = int(func.__name__[-2])
    is_max = func.__name__.startswith("max")
    kernel = per_dim(kernel_size, count, "kernel_size")
    steps = kernel if stride is None or stride == [] else per_dim(stride, count, "stride")
    pads, spread = list(per_dim(padding, count, "padding")), per_dim(dilation, count, "dilation")
    local, cuts = x.local, dict(x.cuts)
    for i in range(count):
        dim = x.ndim - count + i
        if dim not in x.cuts:
            continue
        cut, pad = without_runs(x, dim), pads[i]
        length = output_length(cut.length, kernel[i], steps[i], (pad, pad), spread[i], ceil_mode)
        out = resized(cut, balanced(length, x, dim, func.__name__))
        wanted = [
            window_segments(a, b, cut.length, kernel[i], steps[i], pad, pad, spread[i])
            for a, b in zip(out.bounds, out.bounds[1:], strict=False)
        ]
        local = window_of(local, dim, cut, wanted, -math.inf if is_max else 0.0, x)
        cuts[dim], pads[i] = out, 0
    if is_max:
        more["dilation"] = spread
    # Windows end where blocks end, so rounding up changes nothing in a cut dim.
    return like(x, func(local, kernel, steps, pads, ceil_mode=ceil_mode, **more), cuts)


# -- padding --------------------------------------------------------------------------------------


@rule("pad", "constant_pad_nd")
def _pad(
    func: Callable[..., Any],
    input: Split,
    pad: Sequence[int],
    mode: str = "constant",
    value: float | None = None,
) -> Tensor:
    x, widths = input, list(pad)
    if func.__name__ == "constant_pad_nd":
        mode, value = "constant", mode if not isinstance(mode, str) else value
    if mode not in _PAD_MODES:
        raise NoRule(f"mode {mode!r}")
    local, cuts = x.local, dict(x.cuts)
    for dim in x.cuts:
        at = 2 * (x.ndim - 1 - dim)
        if at >= len(widths) or not (widths[at] or widths[at + 1]):
            continue
        low, high = widths[at], widths[at + 1]
        if min(low, high) < 0:
            raise NeedsWhole(dim, "a crop along the cut")
        cut = without_runs(x, dim)
        out = resized(cut, balanced(cut.length + low + high, x, dim, "pad"))
        wanted = [
            window_segments(a, b, cut.length, 1, 1, low, high, 1, _PAD_MODES[mode])
            for a, b in zip(out.bounds, out.bounds[1:], strict=False)
        ]
        local = window_of(local, dim, cut, wanted, float(value or 0), x)
        cuts[dim], widths[at], widths[at + 1] = out, 0, 0
    if any(widths):
        local = F.pad(local, widths, mode, value)
    return like(x, local, cuts)


# -- interpolation --------------------------------------------------------------------------------


@rule("interpolate", "upsample")
def _interpolate(
    func: Callable[..., Any],
    input: Split,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tensor:
    x, count = input, input.ndim - 2
    if not any(dim >= 2 for dim in x.cuts):
        options = {"antialias": antialias} if antialias else {}
        local = F.interpolate(
            x.local, size, scale_factor, mode, align_corners, recompute_scale_factor, **options
        )
        return like(x, local)
    kind = {"bilinear": "linear", "trilinear": "linear", "bicubic": "cubic"}.get(mode, mode)
    if antialias or kind not in ("nearest", "nearest-exact", "linear", "cubic"):
        raise NoRule(f"mode {mode!r}" if not antialias else "antialias")
    scales: list[float | None] = [None] * count
    if size is not None:
        sizes = list(per_dim(size, count, "size"))
    else:
        given = [scale_factor] * count if isinstance(scale_factor, (int, float)) else scale_factor
        sizes = [math.floor(n * s) for n, s in zip(x.shape[2:], given, strict=True)]
        if not recompute_scale_factor:
            scales = [float(s) for s in given]
    local, cuts, rest = x.local, dict(x.cuts), []
    for i in range(count):
        dim = 2 + i
        if dim not in x.cuts:
            rest.append(i)
            continue
        cut = without_runs(x, dim)
        out = resized(cut, balanced(sizes[i], x, dim, "interpolate"))
        numbers = (cut.length, sizes[i], kind, scales[i], bool(align_corners),
                   x.dtype == torch.float64)  # fmt: skip
        needed = [_needed(a, b, *numbers) for a, b in zip(out.bounds, out.bounds[1:], strict=False)]
        local = window_of(local, dim, cut, [span(a, b) for a, b in needed], 0.0, x)
        low, high = out.bounds[cut.comm.rank : cut.comm.rank + 2]
        local = _resampled(local, dim, needed[cut.comm.rank][0], low, high, *numbers)
        cuts[dim] = out
    if rest:  # the dims that are whole here; those done already keep their size
        if scales[rest[0]] is not None:
            factors = [scales[i] or 1.0 if i in rest else 1.0 for i in range(count)]
            local = F.interpolate(local, None, factors, mode, align_corners)
        else:
            sized = [sizes[i] if i in rest else local.shape[2 + i] for i in range(count)]
            local = F.interpolate(local, sized, None, mode, align_corners)
    return like(x, local, cuts)


@lru_cache(1024)
def _needed(
    low: int, high: int, n: int, m: int, kind: str, scale: float | None, corners: bool, double: bool
) -> tuple[int, int]:
    return resample_needed(low, high, n, m, kind, scale=scale, align_corners=corners, double=double)


@lru_cache(1024)
def _taps(
    first: int, low: int, high: int, n: int, m: int, kind: str, scale: float | None,
    corners: bool, double: bool,
) -> tuple[tuple[Tensor, Tensor], ...]:  # fmt: skip
    """Return, for each tap, which point of the window each output reads, and its weight."""
    taps = [
        resample_taps(j, n, m, kind, scale=scale, align_corners=corners, double=double)
        for j in range(low, high)
    ]
    with torch.inference_mode(False):  # kept, and used where gradients are wanted
        return tuple(
            (
                torch.tensor([tap.points[k] - first for tap in taps], device="cpu"),
                torch.tensor([tap.weights[k] for tap in taps], dtype=torch.float64, device="cpu"),
            )
            for k in range(len(taps[0].points))
        )


def _resampled(x: Tensor, dim: int, first: int, low: int, high: int, *numbers: Any) -> Tensor:
    total: Tensor | None = None
    for index, weights in _taps(first, low, high, *numbers):
        points = x.index_select(dim, index.to(x.device))
        if numbers[2] not in ("nearest", "nearest-exact"):
            shape = [-1 if d == dim else 1 for d in range(x.ndim)]
            points = points * weights.to(x.device, x.dtype).view(shape)
        total = points if total is None else total + points
    if total is None:
        raise NoRule("no outputs")
    return total
