"""Rules for what reads windows: convolution, pooling, padding, interpolation. Halos first."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unisono.comm.groups import when_forgotten
from unisono.nn.split_tensors.blocks import balanced, joined, own_copy, placed, span, window
from unisono.nn.split_tensors.convolution import (
    ConvSettings,
    SpacePlan,
    convolved_in_space,
    space_plan,
    transposed_plan,
)
from unisono.nn.split_tensors.cuts import SMALLER, Cut, Cuts, Grid, NeedsWhole, NoRule, Run, resized
from unisono.nn.split_tensors.dispatch import call
from unisono.nn.split_tensors.pooling import PoolNumbers, PoolPlan, pool_plan
from unisono.nn.split_tensors.reductions import added
from unisono.nn.split_tensors.resampling import MODES, Taps, taps_of
from unisono.nn.split_tensors.rules import rule
from unisono.nn.split_tensors.tensor import Split, like, without_runs
from unisono.operators.halo import HaloOnGroup
from unisono.topology import HaloPlan, halo
from unisono.topology.decompose import split_sizes
from unisono.topology.resample import Resampling
from unisono.topology.window import (
    PAD_MODES,
    check_pool,
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
) -> Tensor:
    numbers = _fixed(stride), _fixed(padding), _fixed(dilation), groups
    return _in_space(func, input, weight, bias, _conv_plan, numbers)


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
    is_transposed = plan_of is _transposed_plan
    if not isinstance(x, Split):
        return _by_filters(func, x, weight, bias, is_transposed, numbers)
    of_input = {x.ndim - weight.ndim + 1: int(not is_transposed)}
    if (
        isinstance(weight, Split)
        and numbers[3] == 1
        and {of_input.get(dim): cut for dim, cut in x.cuts.items()} == weight.cuts
    ):  # own channels of the input, and what filters have for them: a sum over ranks
        y = added(func(x.local, weight.local, None, *numbers), list(x.cuts.values()), x.run)
        ones = (1,) * (weight.ndim - 2)
        return y if bias is None else call(torch.add, y, call(torch.reshape, bias, (-1, *ones)))
    if isinstance(weight, Split):
        weight = _whole(weight, x.run, func.__name__)
    if isinstance(bias, Split):
        bias = _whole(bias, x.run, func.__name__)
    cuts, run, local, count = x.cuts, x.run, x.local, weight.ndim - 2
    at = local.ndim - count - 1
    if at > 1:
        raise NoRule("more dims than batch, channels and space")
    if at in cuts:
        raise NeedsWhole(at, "channels are cut")
    w = own_copy(weight, cuts.values(), run)
    b = None if bias is None else own_copy(bias, cuts.values(), run)
    plan = plan_of(local.shape, *_where(x, count), weight.shape, numbers)
    if plan is None:
        return like(x, func(local, w, b, *numbers))
    y = convolved_in_space(local[None] if at == 0 else local, w, b, plan[1])
    return like(x, y[0] if at == 0 else y, plan[0])


def _whole(weight: Split, run: Run, name: str) -> Tensor:
    """Return a filter or a bias, whole: they are smaller than the input."""
    run.note(name, SMALLER, weight)
    return joined(weight, weight.cuts)


def _by_filters(
    func: Callable[..., Any],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    is_transposed: bool,
    numbers: tuple[Any, ...],
) -> Tensor:
    """Compute own channels of the result from an input that all ranks have."""
    lead: Any = weight if isinstance(weight, Split) else bias
    filters, groups = int(is_transposed), numbers[3]
    if len(lead.cuts) != 1 or groups != 1:
        raise NoRule("a split weight")
    ((dim, cut),) = lead.cuts.items()
    if lead is weight and dim != filters:
        if weight.shape[filters] < cut.comm.size:
            raise NoRule("a split weight")
        cut = Cut(split_sizes(weight.shape[filters], cut.comm.size), cut.comm)
    filters_of_rank = placed(weight, {filters: cut}, [], lead.run)
    shift = None if bias is None else placed(bias, {0: cut}, [], lead.run)
    y = func(own_copy(x, [cut], lead.run), filters_of_rank, shift, *numbers)
    return like(lead, y, {y.ndim - weight.ndim + 1: cut})


def _where(
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
) -> tuple[Cuts, SpacePlan] | None:
    """Return the cuts of the result and the plan of a convolution; None if no halo is needed.

    `places` are those of this rank: communicators of the same ranks are equal, whichever rank they
    are seen from (on paper, one process sees them from all).
    """
    stride, padding, dilation, groups = numbers
    count, kernel = len(weight) - 2, tuple(weight[2:])
    steps, spread = per_dim(stride, count, "stride"), per_dim(dilation, count, "dilation")
    pads = padding_pairs(padding, kernel, steps, spread)

    def length(i: int, n: int) -> int:
        return output_length(n, kernel[i], steps[i], pads[i], spread[i])

    bounds, index, later = _cut_space(shape, cuts, places, keeps_empty, count, length)
    cut_dims = {i for i in range(count) if len(bounds[2 + i]) > 2}
    if not cut_dims:
        return None
    settings = ConvSettings(
        weight[1] * groups, weight[0], kernel, steps, pads, spread, groups, "zeros"
    )
    comm, ranks = grid or (cuts[0][1].comm, None)
    plan = halo.plan(bounds, index, kernel, steps, pads, spread)
    space = space_plan(settings, HaloOnGroup(comm, plan, ranks, 0.0), "auto")
    if space.cover is None and _torch_pads(plan, pads, cut_dims):
        # A window in the cut dims alone; torch adds the zeros along the others.
        plan = halo.plan(
            bounds,
            index,
            [k if i in cut_dims else 1 for i, k in enumerate(kernel)],
            [n if i in cut_dims else 1 for i, n in enumerate(steps)],
            [pair if i in cut_dims else (0, 0) for i, pair in enumerate(pads)],
            [n if i in cut_dims else 1 for i, n in enumerate(spread)],
        )
        left = tuple(0 if i in cut_dims else low for i, (low, _) in enumerate(pads))
        space = SpacePlan(settings, HaloOnGroup(comm, plan, ranks, 0.0), None, left)
    return later, space


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
    given = zip((*numbers[:3], numbers[4]), names, strict=True)
    steps, pads, more, spread = (per_dim(value, count, name) for value, name in given)

    def length(i: int, n: int) -> int:
        return transposed_length(n, kernel[i], steps[i], pads[i], spread[i], more[i])

    bounds, index, later = _cut_space(shape, cuts, places, keeps_empty, count, length)
    if all(len(bounds_of_dim) == 2 for bounds_of_dim in bounds[2:]):
        return None
    for dim, cut in cuts:
        if (i := dim - len(shape) + count) < 0:
            continue
        for a, b in pairwise(later[dim].bounds):
            if not transposed_window(a, b, cut.length, kernel[i], steps[i], pads[i], spread[i]):
                raise NeedsWhole(dim, "outputs that no input reaches")
    settings = ConvSettings(
        weight[0], weight[1] * groups, kernel, steps, tuple((n, n) for n in pads), spread, groups,
        "zeros", more,
    )  # fmt: skip
    return later, transposed_plan(settings, bounds, index, *(grid or (cuts[0][1].comm, None)))


def _cut_space(
    shape: Sequence[int],
    cuts: tuple[tuple[int, Cut], ...],
    places: tuple[int, ...],
    keeps_empty: bool,
    count: int,
    length: Callable[[int, int], int],
) -> tuple[tuple[tuple[int, ...], ...], list[int], dict[int, Cut]]:
    """Return cuts of the input by dim, the own index, and the cuts of the result.

    Batch and channels stand first; a batch is taken as one block, whoever has the others.
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


def _torch_pads(plan: HaloPlan, pads: Sequence[tuple[int, int]], cut_dims: set[int]) -> bool:
    """Whether dims that are not cut are read whole, and padded alike on both sides."""
    return all(
        low == high and parts == (0, stop - start)
        for i, ((low, high), (start, stop), parts) in enumerate(
            zip(pads, plan.owned[2:], plan.needed[2:], strict=True)
        )
        if i not in cut_dims
    )


# -- pooling --------------------------------------------------------------------------------------


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
    cuts, plan = _pool_plan(x.local.shape, *_where(x, count), numbers, x.dtype)
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
    bounds, index, later = _cut_space(shape, cuts, places, keeps_empty, count, numbers.length)
    comm, ranks = grid or (cuts[0][1].comm, None)
    return later, pool_plan(bounds, index, comm, ranks, numbers, dtype)


@when_forgotten
def _forget_plans() -> None:
    """Let go of the groups in plans when their world ends: those of the next one equal them."""
    for plan in (_conv_plan, _transposed_plan, _pool_plan):
        plan.cache_clear()


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
            if mode != "constant":
                raise NeedsWhole(dim, "a crop along the cut")
            return _cropped(func, x, dim, list(pad), value)
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
    if any(widths):
        local = F.pad(local, widths, mode, value)
    return like(x, local, cuts)


def _cropped(func: Callable[..., Any], x: Split, dim: int, widths: list[int], value: Any) -> Tensor:
    """Take off a cut dim what a negative width says, then pad the rest."""
    at = 2 * (x.ndim - 1 - dim)
    low, high = max(0, -widths[at]), max(0, -widths[at + 1])
    widths[at], widths[at + 1] = max(0, widths[at]), max(0, widths[at + 1])
    rest = call(torch.narrow, x, dim, low, x.shape[dim] - low - high)
    return call(F.pad, rest, widths, "constant", value)


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
