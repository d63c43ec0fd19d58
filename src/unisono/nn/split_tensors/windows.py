"""Rules for what reads windows: convolution, pooling, padding, interpolation. Halos first."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial, reduce
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unisono.accelerator import copied_once
from unisono.comm.groups import when_forgotten
from unisono.nn.split_tensors.blocks import balanced, own_copy, span, whole_smaller, window
from unisono.nn.split_tensors.convolution import (
    SpacePlan,
    convolved_in_space,
    empty_output,
    space_plan,
    transposed_plan,
)
from unisono.nn.split_tensors.rules import rule
from unisono.nn.split_tensors.tensor import (
    Cut,
    Cuts,
    Grid,
    NeedsWhole,
    NoRule,
    Split,
    like,
    resized,
    without_runs,
)
from unisono.topology.decompose import split_sizes
from unisono.topology.resample import Resampling
from unisono.topology.window import (
    PAD_MODES,
    check_window,
    output_length,
    padding_pairs,
    per_dim,
    transposed_length,
    transposed_window,
)
from unisono.topology.window import window as window_segments

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
    *,
    padding_mode: str = "zeros",
) -> Tensor:
    # torch's function has no mode: a layer whose blocks hold all outside of them gives it.
    plan_of = partial(_conv_plan, padding_mode=padding_mode)
    numbers = _fixed(stride), _fixed(padding), _fixed(dilation), groups
    return _in_space(func, input, weight, bias, plan_of, numbers)


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
    numbers = _fixed(stride), _fixed(padding), _fixed(output_padding), groups, _fixed(dilation)
    return _in_space(func, input, weight, bias, _transposed_plan, numbers)


def _fixed(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _in_space(
    func: Callable[..., Any],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    plan_of: Callable[..., tuple[Cuts, SpacePlan] | None],
    numbers: tuple[Any, ...],
) -> Tensor:
    if not isinstance(x, Split):
        raise NoRule("a replicated input")
    if isinstance(weight, Split):
        weight = whole_smaller(weight, func.__name__)
    if isinstance(bias, Split):
        bias = whole_smaller(bias, func.__name__)
    cuts, run, local, count = x.cuts, x.run, x.local, weight.ndim - 2
    at = local.ndim - count - 1
    if at > 1:
        raise NoRule("more dims than batch, channels and space")
    if at in cuts:
        raise NeedsWhole(at, "channels are cut")
    w = own_copy(weight, cuts.values(), run)
    b = None if bias is None else own_copy(bias, cuts.values(), run)
    plan = plan_of(local.shape, *where(x, count), weight.shape, numbers)
    if plan is None:
        y = func(local, w, b, *numbers)
        if not y.numel():  # second derivatives send what they send elsewhere
            y = y + empty_output(local, w, tuple(y.shape))
        return like(x, y)
    y = convolved_in_space(local[None] if at == 0 else local, w, b, plan[1])
    return like(x, y[0] if at == 0 else y, plan[0])


def where(
    x: Split, count: int
) -> tuple[tuple[tuple[int, Cut], ...], tuple[int, ...], Grid | None, bool]:
    """Return the cuts, this rank's place along each, and the ranks along those in space.

    The ranks are None where there is one cut: they are its own. The last says whether ranks may be
    left without points.
    """
    cuts = x.cuts
    if len(cuts) == 1:
        ((dim, cut),) = cuts.items()
        return ((dim, cut),), (cut.comm.rank,), None, x.run.keeps_empty
    places = tuple([cut.comm.rank for cut in cuts.values()])
    first = x.local.ndim - count
    axes = [axis for dim, cut in cuts.items() if dim >= first for axis in cut.axes]
    return tuple(cuts.items()), places, x.run.grid(axes) if axes else None, x.run.keeps_empty


@lru_cache(4096)
def _conv_plan(
    shape: Sequence[int],
    cuts: tuple[tuple[int, Cut], ...],
    places: tuple[int, ...],
    grid: Grid | None,
    keeps_empty: bool,
    weight: Sequence[int],
    numbers: tuple[Any, Any, Any, int],
    padding_mode: str,
) -> tuple[Cuts, SpacePlan] | None:
    """Return the cuts of the result and the plan of a convolution; None if no halo is needed.

    `places` are those of this rank: communicators of the same ranks are equal, whichever rank they
    are seen from.
    """
    stride, padding, dilation, groups = numbers
    count, kernel = len(weight) - 2, tuple(weight[2:])
    steps, spread = per_dim(stride, count, "stride"), per_dim(dilation, count, "dilation")
    pads = padding_pairs(padding, kernel, steps, spread)

    def length(i: int, n: int) -> int:
        return output_length(n, kernel[i], steps[i], pads[i], spread[i])

    bounds, index, later = cut_space(shape, cuts, places, keeps_empty, count, length)
    if all(len(bounds_of_dim) == 2 for bounds_of_dim in bounds[2:]):
        return None
    comm, ranks = grid or (cuts[0][1].comm, None)
    of_dims = steps, pads, spread, groups, padding_mode
    return later, space_plan(bounds, index, comm, ranks, weight, *of_dims)


@lru_cache(4096)
def _transposed_plan(
    shape: Sequence[int],
    cuts: tuple[tuple[int, Cut], ...],
    places: tuple[int, ...],
    grid: Grid | None,
    keeps_empty: bool,
    weight: Sequence[int],
    numbers: tuple[Any, Any, Any, int, Any],
) -> tuple[Cuts, SpacePlan] | None:
    """Return the plan of a transposed convolution; see `_conv_plan`."""
    count, kernel, groups = len(weight) - 2, tuple(weight[2:]), numbers[3]
    names = ("stride", "padding", "output_padding", "dilation")
    named = zip((*numbers[:3], numbers[4]), names, strict=True)
    steps, pads, more, spread = (per_dim(value, count, name) for value, name in named)

    def length(i: int, n: int) -> int:
        return transposed_length(n, kernel[i], steps[i], pads[i], spread[i], more[i])

    bounds, index, later = cut_space(shape, cuts, places, keeps_empty, count, length)
    if all(len(bounds_of_dim) == 2 for bounds_of_dim in bounds[2:]):
        return None
    for dim, cut in cuts:
        if (i := dim - len(shape) + count) < 0:
            continue
        for a, b in pairwise(later[dim].bounds):
            if keeps_empty:
                break
            if not transposed_window(a, b, cut.length, kernel[i], steps[i], pads[i], spread[i]):
                raise NeedsWhole(dim, "outputs that no input reaches")
    comm, ranks = grid or (cuts[0][1].comm, None)
    numbers_of_dims = steps, pads, spread, groups, more
    return later, transposed_plan(bounds, index, comm, ranks, weight, *numbers_of_dims)


def cut_space(
    shape: Sequence[int],
    cuts: tuple[tuple[int, Cut], ...],
    places: tuple[int, ...],
    keeps_empty: bool,
    count: int,
    length: Callable[[int, int], int],
) -> tuple[tuple[tuple[int, ...], ...], list[int], dict[int, Cut]]:
    """Return cuts of the input by dim, the own index, and the cuts of the result.

    Batch and channels stand first; a batch is taken as one block, on any rank.
    `length(i, n)` is that of the result in the i-th dim in space.
    """
    ahead = len(shape) - count  # dims before those in space
    bounds: list[tuple[int, ...]] = [(0, n) for n in [1] * (2 - ahead) + list(shape)]
    index, later = [0] * len(bounds), dict(cuts)
    for (dim, cut), place in zip(cuts, places, strict=True):
        i = dim - ahead
        if i < 0:
            continue
        if cut.outer != 1:
            raise NeedsWhole(dim, "the cut lies inside merged dims")
        points = length(i, cut.length)
        if points < cut.comm.size and not keeps_empty:
            raise NeedsWhole(dim, f"{points} points for {cut.comm.size} ranks")
        later[dim] = resized(cut, split_sizes(points, cut.comm.size))
        bounds[2 + i], index[2 + i] = cut.bounds, place
    return tuple(bounds), index, later


when_forgotten(_conv_plan.cache_clear)
when_forgotten(_transposed_plan.cache_clear)


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
    if mode not in PAD_MODES:
        raise NoRule(f"mode {mode!r}")
    cuts, windows = dict(x.cuts), {}
    for dim in x.cuts:
        at = 2 * (x.ndim - 1 - dim)
        if at >= len(widths) or not (widths[at] or widths[at + 1]):
            continue
        low, high = widths[at], widths[at + 1]
        if min(low, high) < 0:
            raise NeedsWhole(dim, "a crop along the cut")
        cut = without_runs(x, dim)
        length = check_window(cut.length, 1, 1, low, high, 1, PAD_MODES[mode])
        out = resized(cut, balanced(length, x, dim, "pad"))
        windows[dim] = (
            cut,
            [
                window_segments(a, b, cut.length, 1, 1, low, high, 1, PAD_MODES[mode])
                for a, b in pairwise(out.bounds)
            ],
        )
        cuts[dim], widths[at], widths[at + 1] = out, 0, 0
    if isinstance(value, complex):
        raise NoRule("filled with a complex number")
    local = window(x, windows, float(value or 0))
    if any(widths):  # torch reflects and repeats no blocks without points
        local = F.pad(local, widths, mode if local.numel() else "constant", value)
    return like(x, local, cuts)


# -- interpolation --------------------------------------------------------------------------------


MODES = {
    "nearest": "nearest",
    "nearest-exact": "nearest-exact",
    "linear": "linear",
    "bilinear": "linear",
    "trilinear": "linear",
    "bicubic": "cubic",
}
"""torch's modes -> the kernel in each dim."""


@dataclass(frozen=True)
class Taps:
    """Which points of a window make each output of one dim, and their weights."""

    points: tuple[tuple[int, ...], ...]
    """For each tap, its position in the window for every output."""
    weights: tuple[tuple[float, ...], ...]

    @cached_property
    def _tensors(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """The same as tensors, one pair a tap."""
        with torch.inference_mode(False):  # kept, and used where gradients are needed
            return tuple(
                (
                    torch.tensor(points, dtype=torch.long, device="cpu"),
                    torch.tensor(weights, dtype=torch.float64, device="cpu"),
                )
                for points, weights in zip(self.points, self.weights, strict=True)
            )

    def resampled(self, x: Tensor, dim: int) -> Tensor:
        """Return the weighted sums of points of a window along a dim."""
        shape = [-1 if d == dim else 1 for d in range(x.dim())]
        parts: list[Tensor] = []
        for points, weights in self._tensors:
            part = x.index_select(dim, copied_once(points, x.device))
            if len(self.points) > 1:
                part = part * copied_once(weights, x.device, x.dtype).view(shape)
            parts.append(part)
        return reduce(torch.add, parts)


@lru_cache(1024)
def taps_of(how: Resampling, y0: int, y1: int, start: int) -> Taps:
    """Return the taps of outputs `[y0, y1)` of one dim, for a window that begins at `start`."""
    each = [how.taps(j) for j in range(y0, y1)]
    count = len(each[0].points) if each else 1
    return Taps(
        tuple(tuple(t.points[k] - start for t in each) for k in range(count)),
        tuple(tuple(t.weights[k] for t in each) for k in range(count)),
    )


def resampled(window: Tensor, taps: Sequence[Taps]) -> Tensor:
    """Return the weighted sums of taps, one spatial dim after the other."""
    for dim, own in enumerate(taps, 2):
        window = own.resampled(window, dim)
    return window


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
    if not any(dim >= 2 for dim in x.cuts) and not x.run.keeps_empty:
        options = {"antialias": antialias} if antialias else {}
        local = F.interpolate(
            x.local, size, scale_factor, mode, align_corners, recompute_scale_factor, **options
        )
        return like(x, local)
    if (size is None) == (scale_factor is None):
        raise NoRule("not one of size and scale_factor")
    if antialias or mode not in MODES:
        raise NoRule(f"mode {mode!r}" if not antialias else "antialias")
    if not x.is_floating_point() and not mode.startswith("nearest"):
        raise NoRule("weighted sums of integers")
    kind = MODES[mode]
    scales: list[float | None] = [None] * count
    if size is not None:
        sizes = list(per_dim(size, count, "size"))
    else:
        factors_given = (
            [scale_factor] * count if isinstance(scale_factor, (int, float)) else scale_factor
        )
        sizes = [math.floor(n * s) for n, s in zip(x.shape[2:], factors_given, strict=True)]
        if not recompute_scale_factor:
            scales = [float(s) for s in factors_given]
    cuts, rest, windows, taps = dict(x.cuts), list[int](), {}, dict[int, Taps]()
    for i in range(count):
        dim = 2 + i
        if dim not in x.cuts:
            rest.append(i)
            continue
        cut = without_runs(x, dim)
        out = resized(cut, balanced(sizes[i], x, dim, "interpolate"))
        double = x.dtype == torch.float64
        how = Resampling(cut.length, sizes[i], kind, scales[i], bool(align_corners), double)
        needed = [how.needed(a, b) for a, b in pairwise(out.bounds)]
        windows[dim] = cut, [span(a, b) for a, b in needed]
        low, high = out.bounds[cut.comm.rank : cut.comm.rank + 2]
        start = needed[cut.comm.rank][0]
        taps[dim] = taps_of(how, low, high, start)
        cuts[dim] = out
    local = window(x, windows)
    for dim, own in taps.items():
        local = own.resampled(local, dim)
    if 0 in local.shape or not (x.is_floating_point() or x.dtype == torch.uint8):
        for i in rest:  # torch resizes neither blocks without points nor other integers
            how = Resampling(x.shape[2 + i], sizes[i], kind, scales[i], bool(align_corners), False)
            local = taps_of(how, 0, sizes[i], 0).resampled(local, 2 + i)
    elif rest:  # the dims that are whole here; those done already keep their size
        if scales[rest[0]] is not None:
            factors = [scales[i] or 1.0 if i in rest else 1.0 for i in range(count)]
            local = F.interpolate(local, None, factors, mode, align_corners)
        else:
            sized = [sizes[i] if i in rest else local.shape[2 + i] for i in range(count)]
            local = F.interpolate(local, sized, None, mode, align_corners)
    return like(x, local, cuts)
