"""Rules for views: where the cut goes when dims are renamed, merged, parted or indexed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from unisono.expect import is_integer
from unisono.nn.split_tensors.blocks import (
    balanced,
    fitted,
    in_order,
    joined,
    joined_cuts,
    layout_of,
    recut,
    sliced,
    span,
    window,
)
from unisono.nn.split_tensors.dispatch import call
from unisono.nn.split_tensors.rules import rule, with_tensors
from unisono.nn.split_tensors.tensor import (
    Cut,
    NeedsWhole,
    NoRule,
    Split,
    like,
    resized,
    without_runs,
)
from unisono.operators import concat_replicated
from unisono.topology import Segment
from unisono.topology.decompose import split_sizes


def _sizes(sizes_or_list: tuple[Any, ...]) -> list[int]:
    """Return sizes that were given one by one or as one sequence."""
    sizes = (
        sizes_or_list[0]
        if len(sizes_or_list) == 1 and not is_integer(sizes_or_list[0])
        else sizes_or_list
    )
    return [int(n) for n in sizes]


# -- dims get other places ------------------------------------------------------------------------


@rule("permute")
def _permute(func: Callable[..., Any], input: Split, *dims: Any) -> Tensor:
    order = [d % input.ndim for d in _sizes(dims)]
    cuts = {order.index(dim): cut for dim, cut in input.cuts.items()}
    return like(input, input.local.permute(order), cuts)


@rule("transpose", "t")
def _transpose(func: Callable[..., Any], input: Split, dim0: int = -1, dim1: int = -2) -> Tensor:
    if input.ndim < 2:
        return like(input, input.local)
    a, b = dim0 % input.ndim, dim1 % input.ndim
    cuts = {{a: b, b: a}.get(dim, dim): cut for dim, cut in input.cuts.items()}
    return like(input, input.local.transpose(a, b), cuts)


@rule("unsqueeze")
def _unsqueeze(func: Callable[..., Any], input: Split, dim: int) -> Tensor:
    dim %= input.ndim + 1
    cuts = {d + (dim <= d): cut for d, cut in input.cuts.items()}
    return like(input, input.local.unsqueeze(dim), cuts)


@rule("squeeze")
def _squeeze(func: Callable[..., Any], input: Split, dim: Any = None) -> Tensor:
    dims = range(input.ndim) if dim is None else [dim] if is_integer(dim) else dim
    gone = sorted({d % input.ndim for d in dims if input.shape[d] == 1})
    for d in gone:
        if d in input.cuts:
            raise NeedsWhole(d, "one point")
    cuts = {d - sum(g < d for g in gone): cut for d, cut in input.cuts.items()}
    return like(input, input.local.squeeze(gone), cuts)


@rule("expand")
def _expand(func: Callable[..., Any], input: Split, *sizes: Any, implicit: bool = False) -> Tensor:
    shape = _sizes(sizes)
    more = len(shape) - input.ndim
    for dim, cut in input.cuts.items():
        if shape[dim + more] not in (-1, cut.length):
            raise NoRule("expand of a cut dim")
        shape[dim + more] = -1
    return like(input, input.local.expand(shape), {d + more: c for d, c in input.cuts.items()})


@rule("repeat")
def _repeat(func: Callable[..., Any], input: Split, *sizes: Any) -> Tensor:
    """Show every dim several times, in a dim before it, and merge the two."""
    times = _sizes(sizes)
    shape = [1] * (len(times) - input.ndim) + list(input.shape)
    apart = call(torch.reshape, input, [n for size in shape for n in (1, size)])
    several = [n for pair in zip(times, shape, strict=True) for n in pair]
    merged = [n * size for n, size in zip(times, shape, strict=True)]
    return call(torch.reshape, call(Tensor.expand, apart, several), merged)


# -- dims are merged and parted -------------------------------------------------------------------


def _groups(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[range, range]]:
    """Yield runs of old dims and of new dims that hold the same points."""
    i = j = 0
    while i < len(old) or j < len(new):
        i0, j0 = i, j
        left = right = 1
        if i < len(old):
            left, i = old[i], i + 1
        if j < len(new):
            right, j = new[j], j + 1
        while left != right:
            if left < right:
                left, i = left * old[i], i + 1
            else:
                right, j = right * new[j], j + 1
        if math.prod(old[i:]) == math.prod(new[j:]) == 1:  # only dims of one point are left
            i, j = len(old), len(new)
        yield range(i0, i), range(j0, j)


def _reshaped(x: Split, new: list[int]) -> Tensor:
    if 0 in x.shape:
        raise NoRule("a tensor without points")
    if -1 in new:
        new[new.index(-1)] = x.numel() // -math.prod(new)
    if math.prod(new) != x.numel():
        raise RuntimeError(f"shape {new} is invalid for a tensor of shape {list(x.shape)}")
    shape = list(new)
    cuts: dict[int, Cut] = {}
    for before, after in _groups(x.shape, new):
        inside = [dim for dim in before if dim in x.cuts]
        if not inside:
            continue
        if len(inside) > 1:
            return _reshaped(joined_cuts(x, inside[0], inside[1]), new)
        dim, cut = inside[0], x.cuts[inside[0]]
        outer = math.prod(x.shape[before.start : dim]) * cut.outer
        inner = math.prod(x.shape[dim + 1 : before.stop])
        place, runs = _place(new, after, outer, dim)
        unit = math.prod(new[place + 1 : after.stop])
        if any(n * inner % unit for n in cut.sizes):
            # The cuts fall between points of the new dim: move them to where they do not.
            points = new[place] // runs
            lengths = [n * unit for n in balanced(points, x, dim, "a view of blocks")]
            if any(n % inner for n in lengths):
                raise NeedsWhole(dim, "a view without common cuts")
            return _reshaped(recut(x, dim, [n // inner for n in lengths]), new)
        sizes = tuple(n * inner // unit for n in cut.sizes)
        cuts[place] = replace(cut, sizes=sizes, outer=runs)
        shape[place] = runs * cuts[place].own
    return like(x, x.local.reshape(shape), cuts)


def _place(new: Sequence[int], after: range, outer: int, dim: int) -> tuple[int, int]:
    """Return the new dim that is cut, and its runs: what lies before the cut is `outer` points."""
    before = 1
    for place in after:
        runs = outer // before
        is_last = place == after.stop - 1
        if before * runs == outer and new[place] % runs == 0 and (new[place] > runs or is_last):
            return place, runs
        before *= new[place]
        if outer % before:
            break
    raise NeedsWhole(dim, "a view that parts the cut dim elsewhere")


@rule("view", "reshape", "_unsafe_view", "_reshape_alias")
def _view(func: Callable[..., Any], input: Split, *sizes: Any) -> Tensor:
    if isinstance(sizes[0], torch.dtype):
        raise NoRule("a view of another dtype")
    is_alias = func.__name__ == "_reshape_alias"
    return _reshaped(input, _sizes(sizes[:1] if is_alias else sizes))


# -- parts of a dim -------------------------------------------------------------------------------


def _narrowed(x: Split, dim: int, start: int, stop: int, step: int) -> Tensor:
    """Return points `[start, stop)` of a cut dim, every `step`-th one; each rank keeps its own."""
    if (start, stop, step) == (0, x.shape[dim], 1):
        return like(x, x.local)
    x = in_order(x, dim)
    cut = x.cuts[dim]
    sizes, first = [], []
    for low, high in zip(cut.bounds, cut.bounds[1:], strict=False):
        begin = start + max(0, -(-(low - start) // step)) * step
        first.append(begin - low)
        sizes.append(max(0, -(-(min(high, stop) - begin) // step)))
    rank = cut.comm.rank
    begin = min(first[rank], x.local.shape[dim])
    local = x.local[(slice(None),) * dim + (slice(begin, begin + sizes[rank] * step, step),)]
    part = Split(local, {**x.cuts, dim: resized(cut, sizes)}, x.run)
    return _evened(part, dim) if min(sizes) == 0 else part


def _evened(x: Split, dim: int) -> Tensor:
    """Return `x` with points along a dim on each rank; with all on each where they are too few."""
    length, ranks = x.shape[dim], x.cuts[dim].comm.size
    return joined(x, [dim]) if length < ranks else recut(x, dim, split_sizes(length, ranks))


def _picked(x: Split, dim: int, at: int) -> Tensor:
    """Return one point of a cut dim, which all ranks then have; the dim is gone."""
    x = in_order(x, dim)
    cut = x.cuts[dim]
    at += cut.length if at < 0 else 0
    if not 0 <= at < cut.length:
        raise IndexError(f"index {at} is out of bounds for dimension {dim} with size {cut.length}")
    low = cut.bounds[cut.comm.rank]
    is_here = low <= at < low + cut.own
    local = x.local.narrow(dim, at - low if is_here else 0, int(is_here))
    sizes = [int(a <= at < b) for a, b in zip(cut.bounds, cut.bounds[1:], strict=False)]
    whole = concat_replicated(local, dim, sizes, comm=cut.comm).squeeze(dim)
    return like(x, whole, {d - (d > dim): c for d, c in x.cuts.items() if d != dim})


@rule("__iter__")
def _iter(func: Callable[..., Any], input: Split) -> Iterator[Tensor]:
    return iter(call(torch.unbind, input))


def _diagonal_sizes(cut: Cut, first: int, length: int) -> list[int]:
    """Return how many points of a diagonal, which begins at `first` of the dim, each rank has."""
    points = [min(max(bound - first, 0), length) for bound in cut.bounds]
    return [b - a for a, b in itertools.pairwise(points)]


@rule("diagonal", "diagonal_copy")
def _diagonal(
    func: Callable[..., Any], input: Split, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Tensor:
    x, a, b = input, dim1 % input.ndim, dim2 % input.ndim
    inside = [d for d in (a, b) if d in x.cuts]
    rest = {d - (d > a) - (d > b): cut for d, cut in x.cuts.items() if d not in inside}
    if not inside:
        return like(x, func(x.local, offset, a, b), rest)
    if len(inside) > 1:
        raise NeedsWhole(b, "a diagonal of two cut dims")
    dim, cut = inside[0], without_runs(x, inside[0])
    top, left = max(0, -offset), max(0, offset)
    length = max(0, min(x.shape[a] - top, x.shape[b] - left))
    here = _diagonal_sizes(cut, top if dim == a else left, length)
    low = cut.bounds[cut.comm.rank]
    local = func(x.local, offset + low if dim == a else offset - low, a, b)
    part = Split(local, {**rest, x.ndim - 2: resized(cut, here)}, x.run)
    return _evened(part, x.ndim - 2) if min(here) == 0 else part


@rule("slice")
def _slice(
    func: Callable[..., Any],
    input: Split,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Tensor:
    dim %= input.ndim
    if dim not in input.cuts:
        part = input.local[(slice(None),) * dim + (slice(start, end, step),)]
        return like(input, part, input.cuts)
    start, stop, step = slice(start, end, step).indices(input.shape[dim])
    return _narrowed(input, dim, start, max(start, stop), step)


@rule("select")
def _select(func: Callable[..., Any], input: Split, dim: int, index: int) -> Tensor:
    dim %= input.ndim
    if dim in input.cuts:
        return _picked(input, dim, index)
    cuts = {d - (d > dim): cut for d, cut in input.cuts.items()}
    return like(input, input.local.select(dim, index), cuts)


# -- joining --------------------------------------------------------------------------------------


@rule("cat")
def _cat(
    func: Callable[..., Any], tensors: Sequence[Tensor], dim: int = 0, **kwargs: Any
) -> Tensor:
    if kwargs:
        raise NoRule("arguments of an unusual form")
    items = [x for x in tensors if not (x.ndim == 1 and x.numel() == 0)]
    lead = next(x for x in items if isinstance(x, Split))
    dim %= lead.ndim
    layout = layout_of(x for x in items if isinstance(x, Split))
    along = layout.pop(dim - lead.ndim, None)
    cuts = {lead.ndim + place: cut for place, cut in layout.items()}
    if along is None:
        return like(lead, torch.cat([fitted(x, layout, lead.run) for x in items], dim), cuts)
    along = replace(along, outer=1)
    items = [in_order(x, dim) if isinstance(x, Split) and dim in x.cuts else x for x in items]
    shares = _shares(items, dim, along)
    blocks = []
    for x, share in zip(items, shares, strict=True):
        here = resized(along, share)
        if isinstance(x, Split) and dim in x.cuts:
            layout_here = {**layout, dim - lead.ndim: here}
            blocks.append(fitted(recut(x, dim, share), layout_here, lead.run))
        else:
            blocks.append(sliced(fitted(x, layout, lead.run), dim, here))
    sizes = [sum(of_rank) for of_rank in zip(*shares, strict=True)]
    return Split(torch.cat(blocks, dim), {**cuts, dim: resized(along, sizes)}, lead.run)


def _shares(items: Sequence[Tensor], dim: int, along: Cut) -> list[tuple[int, ...]]:
    """Return how many points of each item each rank holds when items are joined along a cut."""
    ranks = along.comm.size
    cut_here = [i for i, x in enumerate(items) if isinstance(x, Split) and dim in x.cuts]
    if len(cut_here) == 1:
        # No message: what comes before the split item goes to the first rank, the rest to the last.
        shares = []
        for i, x in enumerate(items):
            alone = [0] * ranks
            alone[0 if i < cut_here[0] else -1] = x.shape[dim]
            shares.append(tuple(alone) if i != cut_here[0] else x.cuts[dim].sizes)  # type: ignore[attr-defined]
        return shares
    bounds = resized(along, split_sizes(sum(x.shape[dim] for x in items), ranks)).bounds
    shares, first = [], 0
    for x in items:
        last = first + x.shape[dim]
        inside = [(max(a, first), min(b, last)) for a, b in itertools.pairwise(bounds)]
        shares.append(tuple(max(0, b - a) for a, b in inside))
        first = last
    return shares


@rule("scatter", "scatter_add", "scatter_reduce")
def _scatter(
    func: Callable[..., Any], input: Tensor, dim: int, index: Tensor, *more: Any, **options: Any
) -> Tensor:
    """Scatter into the first points alone, where indices are for fewer points."""
    shorter = [d for d, n in enumerate(index.shape) if n < input.shape[d] and d != dim % input.ndim]
    if not shorter:
        raise NoRule("indices for all points")
    d = shorter[0]
    n, length = index.shape[d], input.shape[d]

    def first(x: Tensor) -> Tensor:
        return call(torch.narrow, x, d, 0, n)

    more, options = with_tensors((more, options), first)
    changed = call(func, first(input), dim, index, *more, **options)
    return call(torch.cat, [changed, call(torch.narrow, input, d, n, length - n)], d)


@rule("flip")
def _flip(func: Callable[..., Any], input: Split, *dims: Any) -> Tensor:
    over = [d % input.ndim for d in _sizes(dims)]
    windows = {}
    for dim in over:
        if dim in input.cuts:
            cut = without_runs(input, dim)
            ends = [cut.length - bound for bound in cut.bounds]
            windows[dim] = cut, [span(b, a) for a, b in itertools.pairwise(ends)]
    return like(input, window(input, windows).flip(over))


@rule("roll")
def _roll(func: Callable[..., Any], input: Split, shifts: Any, dims: Any = None) -> Tensor:
    if dims is None or (not is_integer(dims) and len(dims) == 0):
        raise NoRule("the flat tensor rolled")
    by = [shifts] if is_integer(shifts) else list(shifts)
    over = [dims] if is_integer(dims) else list(dims)
    x = input
    for shift, dim in zip(by, (d % input.ndim for d in over), strict=True):
        if dim not in x.cuts:
            x = Split(torch.roll(x.local, shift, dim), x.cuts, x.run)
            continue
        cut = without_runs(x, dim)
        windows = [_wrapped(low - shift, high - low, cut.length)
                  for low, high in zip(cut.bounds, cut.bounds[1:], strict=False)]  # fmt: skip
        x = Split(window(x, {dim: (cut, windows)}), x.cuts, x.run)
    return x


def _wrapped(start: int, count: int, length: int) -> tuple[Segment, ...]:
    """Return `count` points from `start` on, around the ends of the dim."""
    start %= length
    head = min(count, length - start)
    first = span(start, start + head)
    if head == count:
        return first
    return (*first, Segment((head, count), (0, count - head), "copy"))
