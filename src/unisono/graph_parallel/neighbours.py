"""`radius_graph`: the points within a cutoff of some targets, by a cell list in pure torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from unisono.errors import PartitionError
from unisono.graph_parallel.partition import finite_points, integer_list

TARGETS = 4096
"""So many at a time: what has to be held meanwhile stays small."""


class Neighbours(NamedTuple):
    """Edges between points that are near each other."""

    edge_index: Tensor
    """`[2, E]`, int64: source and target; sorted by target, then source."""
    shifts: Tensor
    """`[E, D]`: add it to `pos[source]` for the image that is near; zeros without a cell."""


def radius_graph(
    pos: Tensor,
    cutoff: float,
    *,
    cell: Tensor | None = None,
    pbc: bool | Sequence[bool] = True,
    batch: Tensor | None = None,
    targets: Tensor | None = None,
) -> Neighbours:
    """Return the edges from all points within `cutoff` of each target. Local, no gradient.

    Work and memory go with the targets: only points and images near them are looked at.

    Args:
        pos: `[N, D]`, in one dimension or more; with a cell, inside of it or not.
        cutoff: largest distance; points exactly there count. It may exceed the cell.
        cell: rows are the vectors of a periodic cell, `[D, D]`, or `[B, D, D]` with `batch`. Then
            a point may be its own neighbour through an image.
        pbc: along which vectors of the cell things repeat; the others may be zero.
        batch: graph of each point `[N]`; points of different graphs are never neighbours.
        targets: points that need their neighbours, such as a rank's own nodes; default all.

    >>> radius_graph(torch.tensor([[0.0, 0, 0], [1, 0, 0], [3, 0, 0]]), 1.5).edge_index.tolist()
    [[1, 0], [0, 1]]
    >>> radius_graph(torch.tensor([[0.0, 0], [1, 0], [1, 1]]), 1.0).edge_index.tolist()
    [[1, 0, 2, 1], [0, 1, 1, 2]]
    """
    points, wanted = _checked(pos, cutoff, targets)
    graphs = _graphs(batch, len(points))
    cells, repeats = _cells(cell, pbc, points.shape[1], graphs)
    image, shift = _images(points, wanted, cutoff, cells, repeats, graphs)
    if len(image) == 0:
        none = torch.empty(2, 0, dtype=torch.int64, device=pos.device)
        return Neighbours(none, pos.new_empty(0, pos.shape[1]))
    where = points[image] + shift
    grid = _Grid.of(where, graphs[image], cutoff)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for some in wanted.split(TARGETS):
        near, target = grid.near(points[some], graphs[some])
        target = some[target]
        source = image[near]
        keep = (where[near] - points[target]).square().sum(1) <= cutoff * cutoff
        keep &= (source != target) | (shift[near] != 0).any(1)
        found.append((source[keep], target[keep], shift[near[keep]]))
    source, target, shift = (torch.cat(part) for part in zip(*found, strict=True))
    order = (target * len(points) + source).sort(stable=True).indices
    edges = torch.stack([source, target])[:, order]
    return Neighbours(edges.to(pos.device), shift[order].to(pos.device, pos.dtype))


def wrapped(pos: Tensor, cell: Tensor | None, pbc: bool | Sequence[bool]) -> Tensor:
    """Return positions inside the cell, along the vectors where things repeat."""
    cells, repeats = _cells(cell, pbc, pos.shape[1], torch.empty(0, dtype=torch.int64))
    points = pos.detach().cpu().double()
    fraction = points @ torch.linalg.inv(cells[0])
    return points - torch.where(repeats, fraction.floor(), 0.0) @ cells[0]


class _Grid(NamedTuple):
    """Places in cells that are at least as wide as the cutoff, sorted by cell.

    Cells divide the widest dims, three at most: each dim more has three times as many neighbours.
    """

    dims: Tensor
    low: Tensor
    side: float
    stride: Tensor
    volume: int
    keys: Tensor
    by_cell: Tensor

    @classmethod
    def of(cls, where: Tensor, graphs: Tensor, cutoff: float) -> _Grid:
        """Sort places into cells; those of different graphs never share one."""
        high, low = where.max(0).values, where.min(0).values
        dims = (high - low).argsort(descending=True)[:3]
        low = low[dims]
        wide = high[dims] - low
        # One point far away must not make more cells than an int64 can number.
        most = (2**60 / (int(graphs.max()) + 1)) ** (1 / len(dims)) - 3
        side = max(cutoff, float(wide.max()) / most)
        extent = ((wide / side).floor().long() + 3).tolist()  # a free layer each side: never wraps
        stride = torch.tensor([math.prod(extent[d + 1 :]) for d in range(len(dims))])
        empty = cls(dims, low, side, stride, math.prod(extent), stride, stride)
        keys, by_cell = empty._key(empty._cell(where), graphs).sort(stable=True)
        return empty._replace(keys=keys, by_cell=by_cell)

    def near(self, homes: Tensor, graphs: Tensor) -> tuple[Tensor, Tensor]:
        """Return pairs (number of a place, number of a home) whose cells touch."""
        steps = torch.cartesian_prod(*[torch.tensor([-1, 0, 1])] * len(self.dims))
        steps = steps.reshape(-1, len(self.dims))
        around = (self._cell(homes)[:, None] + steps).reshape(-1, len(self.dims))
        wanted = self._key(around, graphs.repeat_interleave(len(steps)))
        first = torch.searchsorted(self.keys, wanted)
        counts = torch.searchsorted(self.keys, wanted, right=True) - first
        start = (counts.cumsum(0) - counts).repeat_interleave(counts)
        place = torch.arange(int(counts.sum())) - start + first.repeat_interleave(counts)
        home = torch.arange(len(homes)).repeat_interleave(len(steps))
        return self.by_cell[place], home.repeat_interleave(counts)

    def _cell(self, where: Tensor) -> Tensor:
        return ((where[:, self.dims] - self.low) / self.side).floor().long()

    def _key(self, cell: Tensor, graphs: Tensor) -> Tensor:
        return ((cell + 1) * self.stride).sum(1) + graphs * self.volume


def _images(
    points: Tensor,
    wanted: Tensor,
    cutoff: float,
    cells: Tensor,
    repeats: Tensor,
    graphs: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return for each image of a point near the targets its number and its shift.

    Points are counted from inside the cell, however far away they have drifted.
    """
    numbers: list[Tensor] = [torch.empty(0, dtype=torch.int64)]
    shifts: list[Tensor] = [torch.empty(0, points.shape[1], dtype=points.dtype)]
    for graph in graphs[wanted].unique().tolist():
        vectors = cells[graph % len(cells)]
        mine = (graphs == graph).nonzero()[:, 0]
        inverse = torch.linalg.inv(vectors)
        fraction = points[mine] @ inverse
        around = points[wanted[graphs[wanted] == graph]] @ inverse
        # A little more than the cutoff: fractions are rounded, distances decide in the end.
        reach = 1.000001 * cutoff * inverse.norm(dim=0)  # in fractions of each vector
        low, high = around.min(0).values - reach, around.max(0).values + reach
        first = torch.where(repeats, (low - fraction).ceil(), 0.0)
        most = torch.where(repeats, (high - low).floor(), 0.0)
        ranges = [torch.arange(int(count) + 1) for count in most]
        steps = torch.cartesian_prod(*ranges).reshape(-1, len(ranges)).double()
        step = first[:, None] + steps
        moved = fraction[:, None] + step
        inside = ((moved >= low) & (moved <= high)).all(2)
        numbers.append(mine[inside.nonzero()[:, 0]])
        shifts.append(step[inside] @ vectors)
    return torch.cat(numbers), torch.cat(shifts)


def _cells(
    cell: Tensor | None, pbc: bool | Sequence[bool], dims: int, graphs: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the cells `[B, D, D]`, and for each vector whether things repeat along it.

    Where they do not, the vector stands square to the others: it only has to complete them.
    """
    if cell is None:
        return torch.eye(dims, dtype=torch.float64)[None], torch.zeros(dims, dtype=torch.bool)
    asked = "radius_graph(cell=...)"
    wanted = f"one cell [{dims}, {dims}], or one for each graph [B, {dims}, {dims}]"
    if cell.dim() not in (2, 3) or tuple(cell.shape[-2:]) != (dims, dims):
        found = f"a cell of shape {list(cell.shape)} for points in {dims} dimensions"
        raise PartitionError.because(asked, found, None, wanted)
    cells = cell.detach().cpu().double().reshape(-1, dims, dims).clone()
    count = int(graphs.max()) + 1 if len(graphs) else 1
    if cells.shape[0] not in (1, count):
        found = f"{cells.shape[0]} cells for {count} graphs"
        raise PartitionError.because(asked, found, None, wanted)
    if not bool(cells.isfinite().all()):
        raise PartitionError.because(asked, "nan or infinity in it", None, "finite vectors")
    repeats = torch.tensor([pbc] * dims if isinstance(pbc, bool) else [bool(p) for p in pbc])
    if repeats.shape != (dims,):
        found, hint = f"{len(repeats)} entries for {dims} vectors", "pbc=(True, True, False)"
        raise PartitionError.because("radius_graph(pbc=...)", found, None, hint)
    kept = int(repeats.sum())
    for vectors in cells:
        periodic = vectors[repeats]
        spread = torch.linalg.svd(periodic)
        if kept and float(spread.S.min()) < 1e-9 * float(spread.S.max()) + 1e-12:
            raise PartitionError.because(
                asked,
                f"the vectors span no volume: {periodic.tolist()}",
                None,
                f"{kept} vectors that do not lie in one plane, or pbc=False",
            )
        vectors[~repeats] = spread.Vh[kept:]
    return cells, repeats


def _checked(pos: Tensor, cutoff: float, targets: Tensor | None) -> tuple[Tensor, Tensor]:
    hint = "[N, D], floating point: a row for each point; pos[:, None] on a line"
    points = finite_points(pos, "radius_graph", hint)
    if not cutoff > 0:
        raise PartitionError.because(f"radius_graph(cutoff={cutoff})", None, None, "cutoff > 0")
    if targets is None:
        return points, torch.arange(len(points))
    asked, hint = "radius_graph(targets=...)", "the numbers of points: mask.nonzero()[:, 0]"
    return points, integer_list(targets, "targets", asked, hint, below=len(points))


def _graphs(batch: Tensor | None, points: int) -> Tensor:
    """Return the graph of each point."""
    if batch is None:
        return torch.zeros(points, dtype=torch.int64)
    hint = "the number of its graph for each point, from 0 on"
    graphs = integer_list(batch, "batch", "radius_graph(batch=...)", hint)
    if len(graphs) != points:
        raise PartitionError.because(
            "radius_graph(batch=...)",
            f"graphs of {len(graphs)} points, {points} points",
            f"{len(graphs)} != {points}",
            hint,
        )
    return graphs
