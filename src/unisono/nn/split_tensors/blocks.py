"""Blocks that fit each other: windows with a halo, other cuts, and arguments of one layout."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from torch import Tensor

from unisono.nn.split_tensors.preview import with_tensors
from unisono.nn.split_tensors.tensor import (
    Cut,
    NeedsWhole,
    NoRule,
    Run,
    Split,
    is_inplace,
    joined,
    moved,
    own_copy,
    resized,
    sliced,
    splits_in,
)
from unisono.operators import move_cut
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


def window(x: Split, wanted: Wanted, fill: float = 0.0) -> Tensor:
    """Return the own window, in all dims at once; a copy where it is the own block."""
    if not wanted:
        return x.local
    cuts = [(dim, cut.sizes, cut.comm.rank, tuple(own)) for dim, (cut, own) in wanted.items()]
    plan = _plan(tuple(x.local.shape), tuple(cuts), fill)
    if plan.is_identity:  # in memory of its own, as on the other ranks
        return x.local.clone()
    comm, ranks = x.run.grid([axis for cut, _ in wanted.values() for axis in cut.axes])
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
    wanted = [span(*new.bounds[r : r + 2]) for r in range(cut.comm.size)]
    apart = Split(x.local.unflatten(dim, (cut.outer, cut.own)), {}, x.run)
    moved = window(apart, {dim + 1: (cut, wanted)}).flatten(dim, dim + 1)
    return Split(moved, {**x.cuts, dim: new}, x.run)


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
    wanted: tuple[tuple[int, tuple[int, ...], int, tuple[Window, ...]], ...],
    fill: float,
) -> HaloPlan:
    """Return the plan of an exchange: dim, sizes, own place and windows of each cut dim."""
    cuts: list[tuple[int, ...]] = [(0, n) for n in shape]
    index = [0] * len(shape)
    axes = [Axis((0, n), span) for n in shape]
    for dim, sizes, rank, of_ranks in wanted:
        cuts[dim], index[dim] = (0, *itertools.accumulate(sizes)), rank
        axes[dim] = Axis(range(len(sizes) + 1), lambda r, _, of=of_ranks: of[r])
    return plan_windows(cuts, index, axes, fill=fill)


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
        wanted = cuts.get(dim)
        if wanted is not None and wanted.comm == cut.comm and wanted.outer == cut.outer:
            x = recut(x, dim, wanted.sizes)
        elif any(c.comm == cut.comm for c in rest):  # it is broadcast along the cut
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
