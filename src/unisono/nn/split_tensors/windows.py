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

from unisono.errors import PartitionError
from unisono.nn.layers.conv_space import (
    ConvSettings,
    SpacePlan,
    convolved_in_space,
    space_plan,
)
from unisono.nn.planned import is_plain
from unisono.nn.split_tensors.blocks import balanced, exchange_of, span, window
from unisono.nn.split_tensors.tensor import (
    Cut,
    Cuts,
    Grid,
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


def _check_channels(x: Split, count: int, wanted: int, name: str) -> None:
    """Ask for whole channels, as many as a kernel has."""
    channels = x.ndim - count - 1
    if channels in x.cuts:
        raise NeedsWhole(channels, "channels are cut")
    found = x.shape[channels] if channels >= 0 else 0
    if found != wanted:
        where = f" in {x.run.path()}" if x.run.path() else ""
        raise PartitionError.because(
            f"{name}{where} of a split tensor {list(x.shape)}",
            f"a kernel for {wanted} channels",
            f"{found} channels in dim {channels} != {wanted}",
            "the input that the network takes in one process",
        )


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
    _check_channels(x, count, weight.shape[1] * groups, func.__name__)
    w = own_copy(weight, x.cuts.values(), x.run)
    b = None if bias is None else own_copy(bias, x.cuts.values(), x.run)
    if all(dim < x.ndim - count for dim in x.cuts):
        return like(x, func(x.local, w, b, stride, padding, dilation, groups))
    numbers = (_fixed(stride), _fixed(padding), _fixed(dilation), groups)
    places = tuple([cut.comm.rank for cut in x.cuts.values()])
    axes = [axis for d, cut in x.cuts.items() if d >= x.ndim - count for axis in cut.axes]
    space, cuts = _conv_plan(
        x.local.shape, tuple(x.cuts.items()), places, x.run.grid(axes), weight.shape, numbers
    )
    local = x.local if x.ndim == count + 2 else x.local[None]
    y = _convolved(local, w, b, space)
    return like(x, y if x.ndim == count + 2 else y[0], cuts)


def _convolved(x: Tensor, weight: Tensor, bias: Tensor | None, plan: SpacePlan) -> Tensor:
    if is_plain(x):
        return convolved_in_space(x, weight, bias, plan)
    window = x if plan.exchange.halo.is_identity else HaloExchange.apply(x, plan.exchange)
    return plan.settings.convolved(window, weight, bias, padding=plan.padding)


def _fixed(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@lru_cache(4096)
def _conv_plan(
    shape: Sequence[int],
    cuts: tuple[tuple[int, Cut], ...],
    places: tuple[int, ...],
    grid: Grid,
    weight: Sequence[int],
    numbers: tuple[Any, Any, Any, int],
) -> tuple[SpacePlan, Cuts]:
    """Return the plan of a convolution and the cuts of its result, given those of its input.

    `places` are those of this rank: communicators of the same ranks are equal, whichever rank they
    are seen from (on paper, one process sees them from all).
    """
    stride, padding, dilation, groups = numbers
    count, kernel = len(weight) - 2, tuple(weight[2:])
    steps, spread = per_dim(stride, count, "stride"), per_dim(dilation, count, "dilation")
    pads = padding_pairs(padding, kernel, steps, spread)
    ahead = len(shape) - count  # dims before those in space
    bounds: list[Sequence[int]] = [(0, n) for n in [1] * (2 - ahead) + list(shape)]
    index, later, mine = [0] * len(bounds), dict(cuts), set[int]()
    for (dim, cut), place in zip(cuts, places, strict=True):
        i = dim - ahead
        if i < 0:
            continue
        if cut.outer != 1:
            raise NeedsWhole(dim, "the cut lies inside merged dims")
        length = output_length(cut.length, kernel[i], steps[i], pads[i], spread[i])
        if length < cut.comm.size:
            raise NeedsWhole(dim, f"conv: {length} points for {cut.comm.size} ranks")
        later[dim] = resized(cut, split_sizes(length, cut.comm.size))
        bounds[2 + i], index[2 + i] = cut.bounds, place
        mine.add(i)
    settings = ConvSettings(
        weight[1] * groups, weight[0], kernel, steps, pads, spread, groups, "zeros"
    )
    comm, ranks = grid
    plan = halo.plan(bounds, index, kernel, steps, pads, spread)
    space = space_plan(settings, HaloOnGroup(comm, plan, ranks, 0.0), "auto")
    if space.cover is None and _torch_pads(plan, pads, mine):
        # A window in the cut dims alone; torch adds the zeros along the others.
        plan = halo.plan(
            bounds,
            index,
            [k if i in mine else 1 for i, k in enumerate(kernel)],
            [n if i in mine else 1 for i, n in enumerate(steps)],
            [pair if i in mine else (0, 0) for i, pair in enumerate(pads)],
            [n if i in mine else 1 for i, n in enumerate(spread)],
        )
        left = tuple(0 if i in mine else low for i, (low, _) in enumerate(pads))
        space = SpacePlan(settings, HaloOnGroup(comm, plan, ranks, 0.0), None, left)
    return space, later


def _torch_pads(plan: HaloPlan, pads: Sequence[tuple[int, int]], mine: set[int]) -> bool:
    """Whether dims that are not cut are read whole, and padded alike on both sides."""
    return all(
        low == high and parts == (0, stop - start)
        for i, ((low, high), (start, stop), parts) in enumerate(
            zip(pads, plan.own[2:], plan.needed[2:], strict=True)
        )
        if i not in mine
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
    _check_channels(x, count, weight.shape[0], func.__name__)
    kernel, steps = tuple(weight.shape[2:]), per_dim(stride, count, "stride")
    spread = per_dim(dilation, count, "dilation")
    pads = list(per_dim(padding, count, "padding"))
    more = list(per_dim(output_padding, count, "output_padding"))
    cuts, trims, wanted = dict(x.cuts), [(0, 0)] * count, {}
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
        wanted[dim] = cut, [span(a, b) for a, b in needed]
        first, last = transposed_cover(needed[cut.comm.rank], *numbers)
        low, high = out.bounds[cut.comm.rank : cut.comm.rank + 2]
        trims[i], cuts[dim], pads[i], more[i] = (first - low, high - last), out, 0, 0
    own = own_copy(weight, x.cuts.values(), x.run)
    if wanted and x.ndim == count + 2:
        settings = _TransposedSettings(
            weight.shape[0], weight.shape[1] * groups, kernel, steps,
            tuple((n, n) for n in pads), spread, groups, "zeros", tuple(more),
        )  # fmt: skip
        result = _convolved(x.local, own, None, SpacePlan(settings, exchange_of(x, wanted), None))
    else:
        result = func(window(x, wanted), own, None, steps, pads, more, groups, spread)
    result = F.pad(result, [n for pair in reversed(trims) for n in pair])
    if bias is not None:
        shift = own_copy(bias, x.cuts.values(), x.run)
        result = result + shift.view(-1, *[1] * count)
    return like(x, result, cuts)


@dataclass(frozen=True)
class _TransposedSettings(ConvSettings):
    """A transposed convolution of windows, so that own blocks are kept for its backward."""

    output_padding: tuple[int, ...] = ()

    def convolved(self, window: Tensor, weight: Tensor, bias: Tensor | None, **_: Any) -> Tensor:
        """Return all outputs that the window reaches."""
        call = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}[self.dims]
        pads = [low for low, _ in self.padding]
        return call(
            window, weight, bias, self.stride, pads, self.output_padding, self.groups, self.dilation
        )

    def gradients(
        self,
        dy: Tensor,
        window: Tensor,
        weight: Tensor,
        wanted: tuple[bool, bool, bool],
        padding: tuple[int, ...] | None = None,  # noqa: ARG002
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of window, weight and bias that are wanted. Not differentiable."""
        pads = [low for low, _ in self.padding]
        return torch.ops.aten.convolution_backward(
            dy, window, weight, [dy.shape[1]], self.stride, pads, self.dilation, True,
            self.output_padding, self.groups, wanted,
        )  # fmt: skip


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
    cuts, wanted = dict(x.cuts), {}
    for i in range(count):
        dim = x.ndim - count + i
        if dim not in x.cuts:
            continue
        cut, pad = without_runs(x, dim), pads[i]
        length = output_length(cut.length, kernel[i], steps[i], (pad, pad), spread[i], ceil_mode)
        out = resized(cut, balanced(length, x, dim, func.__name__))
        wanted[dim] = (
            cut,
            [
                window_segments(a, b, cut.length, kernel[i], steps[i], pad, pad, spread[i])
                for a, b in zip(out.bounds, out.bounds[1:], strict=False)
            ],
        )
        cuts[dim], pads[i] = out, 0
    local = window(x, wanted, -math.inf if is_max else 0.0)
    if is_max:
        more["dilation"] = spread
    # Windows end where blocks end, so rounding up changes nothing in a cut dim.
    more["ceil_mode"] = ceil_mode
    if not is_max or count == 1 or local is x.local or not is_plain(local):
        return like(x, func(local, kernel, steps, pads, **more), cuts)
    return like(x, _Largest.apply(local, count, (kernel, steps, pads, spread, ceil_mode)), cuts)


class _Largest(torch.autograd.Function):
    """Largest points of windows; keeps where they are, which torch's own needs the windows for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, settings: tuple[Any, ...]) -> Tensor:
        """Return them."""
        pool = F.max_pool2d if count == 2 else F.max_pool3d
        y, indices = pool(x, *settings, return_indices=True)
        ctx.settings, ctx.shape = (count, settings), x.shape
        ctx.save_for_backward(indices)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients at those places."""
        (indices,) = ctx.saved_tensors
        count, settings = ctx.settings
        aten = torch.ops.aten
        placed = (
            aten.max_pool2d_with_indices_backward
            if count == 2
            else aten.max_pool3d_with_indices_backward
        )
        # Of the windows only the shape is read.
        return placed(grads[0], grads[0].new_empty(ctx.shape), *settings, indices), None, None


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
    cuts, wanted = dict(x.cuts), {}
    for dim in x.cuts:
        at = 2 * (x.ndim - 1 - dim)
        if at >= len(widths) or not (widths[at] or widths[at + 1]):
            continue
        low, high = widths[at], widths[at + 1]
        if min(low, high) < 0:
            raise NeedsWhole(dim, "a crop along the cut")
        cut = without_runs(x, dim)
        out = resized(cut, balanced(cut.length + low + high, x, dim, "pad"))
        wanted[dim] = (
            cut,
            [
                window_segments(a, b, cut.length, 1, 1, low, high, 1, _PAD_MODES[mode])
                for a, b in zip(out.bounds, out.bounds[1:], strict=False)
            ],
        )
        cuts[dim], widths[at], widths[at + 1] = out, 0, 0
    local = window(x, wanted, float(value or 0))
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
    cuts, rest, wanted, resample = dict(x.cuts), [], {}, {}
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
        wanted[dim] = cut, [span(a, b) for a, b in needed]
        low, high = out.bounds[cut.comm.rank : cut.comm.rank + 2]
        resample[dim] = needed[cut.comm.rank][0], low, high, *numbers
        cuts[dim] = out
    local = window(x, wanted)
    for dim, taps in resample.items():
        local = _resampled(local, dim, *taps)
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
