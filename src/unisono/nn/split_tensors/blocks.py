"""Blocks that fit each other: windows with a halo, other cuts, and arguments of one layout."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from unisono.comm import Communicator
from unisono.nn.split_tensors.rules import is_inplace, with_tensors
from unisono.nn.split_tensors.tensor import (
    SMALLER,
    Cut,
    NeedsWhole,
    NoRule,
    Run,
    Split,
    resized,
    splits_in,
)
from unisono.operators import concat_replicated, copy, move_cut, slice_replicated
from unisono.operators.halo import HaloExchangeMap, HaloOnGroup
from unisono.topology import HaloPlan, Segment
from unisono.topology.decompose import split_sizes
from unisono.topology.halo import Axis, plan_windows

Window = tuple[Segment, ...]
"""What one rank wants of a dim: runs of points, and of padding."""
Wanted = Mapping[int, tuple[Cut, Sequence[Window]]]
"""Dim -> its cut, and the windows of the ranks along it."""
Layout = dict[int, Cut]
"""Dim counted from the end -> cut: what arguments of unlike numbers of dims have in common."""


def balanced(length: int, x: Split, dim: int, what: str) -> tuple[int, ...]:
    """Return the sizes in which a result is cut; whole if there are fewer points than ranks."""
    ranks = x.cuts[dim].comm.size
    if length < ranks and not x.run.keeps_empty:
        raise NeedsWhole(dim, f"{what}: {length} points for {ranks} ranks")
    return split_sizes(length, ranks)


def window(x: Split, windows: Wanted, fill: float = 0.0) -> Tensor:
    """Return the own window, in all dims at once; a copy where it is the own block."""
    if not windows:
        return x.local
    cuts = [
        (dim, cut.sizes, cut.comm.rank, tuple(of_ranks)) for dim, (cut, of_ranks) in windows.items()
    ]
    plan = _plan(tuple(x.local.shape), tuple(cuts), fill)
    if plan.is_identity:  # in memory of its own, as on the other ranks
        return x.local.clone()
    comm, ranks = x.run.grid([axis for cut, _ in windows.values() for axis in cut.axes])
    return HaloExchangeMap.apply(x.local, HaloOnGroup(comm, plan, ranks, fill))


def span(start: int, stop: int) -> Window:
    """Return the window of the points `[start, stop)`."""
    return (Segment((0, stop - start), (start, stop), "copy"),) if start < stop else ()


def recut(x: Split, dim: int, sizes: Sequence[int]) -> Split:
    """Return `x` with other sizes of the blocks along `dim`."""
    cut = x.cuts[dim]
    if tuple(sizes) == cut.sizes:
        return x
    new = resized(cut, sizes)
    if new.length != cut.length:
        raise NoRule("sizes that do not fit")
    windows = [span(*new.bounds[r : r + 2]) for r in range(cut.comm.size)]
    apart = Split(x.local.unflatten(dim, (cut.outer, cut.own)), {}, x.run)
    moved = window(apart, {dim + 1: (cut, windows)}).flatten(dim, dim + 1)
    return Split(moved, {**x.cuts, dim: new}, x.run)


def cut_along(x: Split, comms: Mapping[int, Communicator]) -> Split:
    """Return `x` with its cuts along these dims, each over these ranks; what does not fit stays."""
    for dim, comm in comms.items():
        at, cut = next(((d, c) for d, c in x.cuts.items() if comm in c.axes), (dim, None))
        if cut is None or at == dim or dim in x.cuts or x.shape[dim] < comm.size:
            continue
        sizes = split_sizes(x.shape[dim], comm.size)
        if not cut.joins:
            x = moved(x, at, dim, sizes)
        elif comm == cut.joins[-1]:
            x = parted_cut(x, at, dim, sizes)
    return x


def in_order(x: Split, dim: int) -> Split:
    """Return `x` with points along a cut dim that follow each other: whole runs on each rank."""
    cut = x.cuts[dim]
    if cut.outer == 1:
        return x
    if cut.outer < cut.comm.size:
        raise NeedsWhole(dim, f"{cut.outer} runs inside merged dims for {cut.comm.size} ranks")
    rows, length = split_sizes(cut.outer, cut.comm.size), sum(cut.sizes)
    apart = x.local.unflatten(dim, (cut.outer, cut.own))
    moved = move_cut(apart, dim + 1, dim, cut.sizes, rows, comm=cut.comm).flatten(dim, dim + 1)
    later = replace(cut, sizes=tuple(n * length for n in rows), outer=1)
    return Split(moved, {**x.cuts, dim: later}, x.run)


@lru_cache(4096)
def _plan(
    shape: tuple[int, ...],
    windows: tuple[tuple[int, tuple[int, ...], int, tuple[Window, ...]], ...],
    fill: float,
) -> HaloPlan:
    """Return the plan of an exchange: dim, sizes, own place and windows of each cut dim."""
    cuts: list[tuple[int, ...]] = [(0, n) for n in shape]
    index = [0] * len(shape)
    axes = [Axis((0, n), span) for n in shape]
    for dim, sizes, rank, of_ranks in windows:
        cuts[dim], index[dim] = (0, *itertools.accumulate(sizes)), rank
        axes[dim] = Axis(range(len(sizes) + 1), lambda r, _, of=of_ranks: of[r])
    return plan_windows(cuts, index, axes, fill=fill)


# -- movements of one dim -------------------------------------------------------------------------


def joined(x: Split, dims: Iterable[int]) -> Tensor:
    """Return `x` with these dims whole and replicated; a plain tensor if no cut is left."""
    local, cuts = x.local, dict(x.cuts)
    for dim in list(dims):
        cut = cuts.pop(dim)
        local = unrolled(
            local, dim, cut, lambda t, d, c: concat_replicated(t, d, c.sizes, comm=c.comm)
        )
    return Split(local, cuts, x.run) if cuts else local


def whole_smaller(x: Split, function: str) -> Tensor:
    """Return an argument that is smaller than the input, such as a filter, whole."""
    x.run.note(function, SMALLER, x)
    return joined(x, x.cuts)


def sliced(x: Tensor, dim: int, cut: Cut) -> Tensor:
    """Return the own block along `dim` of a tensor that the ranks of `cut` hold equal."""
    return unrolled(x, dim, cut, lambda t, d, c: slice_replicated(t, d, c.sizes, comm=c.comm))


def unrolled(x: Tensor, dim: int, cut: Cut, move: Callable[[Tensor, int, Cut], Tensor]) -> Tensor:
    """Move along a dim of one run, or of several: then run and point are two dims meanwhile."""
    if cut.outer == 1:
        return move(x, dim, cut)
    apart = move(x.unflatten(dim, (cut.outer, x.shape[dim] // cut.outer)), dim + 1, cut)
    return apart.flatten(dim, dim + 1)


def joined_cuts(x: Split, one: int, other: int) -> Split:
    """Return `x` with one of two cut dims whole: blocks of the other one are cut once more.

    Each rank keeps its share of the points. The dim whose axis changes slowest stays cut, so that
    its blocks follow each other in the order of the ranks.
    """
    is_slow = x.run.grid(x.cuts[one].axes + x.cuts[other].axes)[1] is None
    dim, gone = (one, other) if is_slow else (other, one)
    first, second = x.cuts[dim], x.cuts[gone]
    joins, ranks = first.axes + second.axes, second.comm.size
    comm, order = x.run.grid(joins)
    if order is not None:
        raise NeedsWhole(gone, "two cut dims merged into one, over axes between which one lies")
    if min(first.sizes) < ranks:
        raise NeedsWhole(gone, f"two cut dims merged: {min(first.sizes)} points for {ranks} ranks")
    parts = [split_sizes(n, ranks) for n in first.sizes]
    local = _moved_cut(x, gone, dim, second.sizes, parts[first.comm.rank], second.comm)
    cut = Cut(tuple(n for part in parts for n in part), comm, first.outer, joins)
    rest = {d: c for d, c in x.cuts.items() if d not in (one, other)}
    return Split(local, {**rest, dim: cut}, x.run)


def parted_cut(x: Split, dim: int, other: int, sizes: Sequence[int]) -> Split:
    """Return `x` with the last axis of the cut of `dim` moved to `other`: what undoes a join."""
    cut = x.cuts[dim]
    *axes, last = cut.joins
    comm, _ = x.run.grid(axes)
    step = last.size
    parts = [cut.sizes[i : i + step] for i in range(0, len(cut.sizes), step)]
    local = _moved_cut(x, dim, other, parts[comm.rank], sizes, last)
    kept = Cut(tuple(map(sum, parts)), comm, cut.outer, tuple(axes) if len(axes) > 1 else ())
    return Split(local, {**x.cuts, dim: kept, other: Cut(tuple(sizes), last)}, x.run)


def moved(x: Split, source: int, dest: int, sizes: Sequence[int]) -> Split:
    """Return `x` with the cut of one dim moved to another, which is whole."""
    cut = x.cuts[source]
    local = _moved_cut(x, source, dest, cut.sizes, sizes, cut.comm)
    rest = {d: c for d, c in x.cuts.items() if d != source}
    return Split(local, {**rest, dest: replace(cut, sizes=tuple(sizes), outer=1)}, x.run)


def _moved_cut(
    x: Split,
    source: int,
    dest: int,
    source_sizes: Sequence[int],
    dest_sizes: Sequence[int],
    comm: Communicator,
) -> Tensor:
    """Return the own block with the cut along `comm` moved from one dim to another."""
    low, high = sorted((source, dest))
    runs = [x.cuts[d].outer if d in x.cuts else 1 for d in (low, high)]
    local = x.local.unflatten(high, (runs[1], x.local.shape[high] // runs[1]))
    local = local.unflatten(low, (runs[0], x.local.shape[low] // runs[0]))
    places = {low: low + 1, high: high + 2}
    moved = move_cut(local, places[source], places[dest], source_sizes, dest_sizes, comm=comm)
    return moved.flatten(high + 1, high + 2).flatten(low, low + 1)


def own_copy(x: Tensor, cuts: Iterable[Cut], run: Run) -> Tensor:
    """Return a replicated tensor for own work along these cuts: its gradient is summed over them.

    Leaves (parameters) are copied once per forward, so that their gradients are summed once.
    """
    if not x.requires_grad or not torch.is_grad_enabled() or not run.sums_gradients:
        return x
    cuts = tuple(cuts)
    if not cuts:
        return x
    key = id(x), frozenset([axis for cut in cuts for axis in cut.axes])
    version, copied = run.copies.get(key, (-1, x))
    if version != x._version or not x.is_leaf:
        copied = copy(x, comm=run.grid([axis for cut in cuts for axis in cut.axes])[0])
        if x.is_leaf:
            run.copies[key] = x._version, copied
    return copied


# -- several arguments ----------------------------------------------------------------------------


def layout_of(tensors: Iterable[Tensor]) -> Layout:
    """Return the cuts of tensors that are broadcast against each other: the first one's count."""
    layout: Layout = {}
    for x in tensors:
        for dim, cut in x.cuts.items() if isinstance(x, Split) else ():
            if all(cut.comm != other.comm for other in layout.values()):
                layout.setdefault(dim - x.ndim, cut)
    return layout


def fitted(x: Tensor, layout: Layout, run: Run) -> Tensor:
    """Return the own block of an argument for work on blocks of this layout."""
    cuts, rest = dict[int, Cut](), list[Cut]()
    for place, cut in layout.items():
        dim = x.ndim + place
        if dim < 0 or (x.shape[dim] == 1 and cut.length > 1):
            rest.append(cut)
        else:
            cuts[dim] = cut
    return placed(x, cuts, rest, run)


def placed(x: Tensor, cuts: Mapping[int, Cut], rest: Sequence[Cut], run: Run) -> Tensor:
    """Return the own block of an argument that is to have these cuts; move what it has.

    Along `rest` every rank does own work with all of it.
    """
    if isinstance(x, Split) and x.cuts == cuts:
        return own_copy(x.local, rest, run)
    for dim, cut in x.cuts.items() if isinstance(x, Split) else ():
        if not isinstance(x, Split):
            break
        cut_wanted = cuts.get(dim)
        if cut_wanted is not None and cut_wanted.comm == cut.comm and cut_wanted.outer == cut.outer:
            x = recut(x, dim, cut_wanted.sizes)
        elif any(c.comm == cut.comm for c in rest):  # it is broadcast along the cut
            run.note("broadcast", SMALLER, x)
            x = joined(x, [dim])
        else:
            to = next((d for d, c in cuts.items() if c.comm == cut.comm and d not in x.cuts), None)
            if to is None or cuts[to].outer != 1 or x.shape[to] != cuts[to].length:
                raise NoRule("arguments cut in different ways")
            x = moved(x, dim, to, cuts[to].sizes)
    local = x.local if isinstance(x, Split) else x
    for dim, cut in cuts.items():
        if isinstance(x, Split) and dim in x.cuts:
            continue
        if x.shape[dim] != cut.length:
            raise NoRule("sizes that do not fit")
        local = sliced(local, dim, cut)
    return own_copy(local, rest, run)


def pointwise(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Compute with blocks what needs at each point only that point of its arguments."""
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    if kwargs.get("out") is not None or len(list(splits_in((args, kwargs)))) > len(tensors):
        raise NoRule("arguments of an unusual form")
    layout = layout_of(tensors)
    run = next(x.run for x in tensors if isinstance(x, Split))
    name = getattr(getattr(func, "overloadpacket", func), "__name__", "")
    changes = is_inplace(name) or kwargs.get("inplace") is True
    if changes:
        target = args[0]
        if not isinstance(target, Split):
            raise NoRule("a replicated tensor changed in place by a split one")
        if {dim - target.ndim: cut for dim, cut in target.cuts.items()} != layout:
            raise NoRule("changed in place by a tensor that is cut in another way")

    def block(x: Any) -> Any:
        return fitted(x, layout, run) if isinstance(x, Tensor) else x

    result = func(*map(block, args), **{key: block(x) for key, x in kwargs.items()})
    if changes:
        return args[0]

    def shown(local: Tensor) -> Tensor:
        same = next((x for x in tensors if isinstance(x, Split) and local is x.local), None)
        cuts = {local.ndim + place: cut for place, cut in layout.items()}
        return Split(local, cuts, run) if same is None else same

    return with_tensors(result, shown)
