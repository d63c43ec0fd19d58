"""`radius_graph`: the points within a cutoff of some targets; vesin searches, or all pairs."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unisono.errors import PartitionError
from unisono.graph_parallel.partition import finite_points, integer_list

TARGETS = 256
"""Rows of a table of distances that are made at a time."""


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
    points, chosen = _checked(pos, cutoff, targets)
    graphs = _graphs(batch, len(points))
    cells, repeats = _cells(cell, pbc, points.shape[1], graphs)
    pieces = [_none(points.shape[1])]
    for graph in graphs[chosen].unique().tolist():
        members = (graphs == graph).nonzero()[:, 0]
        homes = chosen[graphs[chosen] == graph]
        vectors = cells[graph % len(cells)]
        pieces.append(_near(points, members, homes, cutoff, vectors, repeats))
    source, target, shift = (torch.cat(part) for part in zip(*pieces, strict=True))
    order = (target * len(points) + source).sort(stable=True).indices
    edges = torch.stack([source, target])[:, order]
    return Neighbours(edges.to(pos.device), shift[order].to(pos.device, pos.dtype))


def images_near(
    pos: Tensor,
    reach: float,
    targets: Tensor,
    *,
    cell: Tensor | None = None,
    pbc: bool | Sequence[bool] = True,
) -> tuple[Tensor, Tensor]:
    """Return the targets, then all other points and images in a box `reach` around them.

    Returns:
        Number `[M]` and shift `[M, D]` of each; `pos[number] + shift` is inside the cell for
        targets, and near them for the rest.
    """
    points, homes = _checked(pos, reach, targets)
    graphs = torch.zeros(len(points), dtype=torch.int64)
    cells, repeats = _cells(cell, pbc, points.shape[1], graphs)
    outside = _steps_outside(points, cells[0], repeats)
    numbers, steps = homes, torch.zeros(len(homes), points.shape[1], dtype=torch.float64)
    if len(homes):
        inside = points - outside @ cells[0]
        everyone = torch.arange(len(points))
        image, step = _images(inside, everyone, homes, reach, cells[0], repeats)
        is_home = torch.zeros(len(points), dtype=torch.bool).index_fill_(0, homes, True)
        other = ~is_home[image] | (step != 0).any(1)
        numbers, steps = torch.cat([homes, image[other]]), torch.cat([steps, step[other]])
    shifts = (steps - outside[numbers]) @ cells[0]
    return numbers.to(pos.device), shifts.to(pos.device, pos.dtype)


def wrapped(pos: Tensor, cell: Tensor | None, pbc: bool | Sequence[bool]) -> Tensor:
    """Return positions inside the cell, along the vectors where things repeat."""
    cells, repeats = _cells(cell, pbc, pos.shape[1], torch.empty(0, dtype=torch.int64))
    points = pos.detach().cpu().double()
    return points - _steps_outside(points, cells[0], repeats) @ cells[0]


def _steps_outside(points: Tensor, vectors: Tensor, repeats: Tensor) -> Tensor:
    """Return how many cells away from the cell points are, along each vector that repeats."""
    return torch.where(repeats, (points @ torch.linalg.inv(vectors)).floor(), 0.0)


def _none(dims: int) -> tuple[Tensor, Tensor, Tensor]:
    none = torch.empty(0, dtype=torch.int64)
    return none, none, torch.empty(0, dims, dtype=torch.float64)


def _near(
    points: Tensor,
    members: Tensor,
    homes: Tensor,
    cutoff: float,
    vectors: Tensor,
    repeats: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return source, target and shift of the edges in one graph."""
    outside = _steps_outside(points, vectors, repeats)
    inside = points - outside @ vectors
    image, step = _images(inside, members, homes, cutoff, vectors, repeats)
    places = inside[image] + step @ vectors
    number_of_home = torch.full((len(points),), -1)
    number_of_home[homes] = torch.arange(len(homes))
    is_home = (number_of_home[image] >= 0) & (step == 0).all(1)
    first, second = _pairs(places, is_home, cutoff)
    keep = (places[first] - places[second]).square().sum(1) <= cutoff * cutoff
    first, second = first[keep], second[keep]
    source, target = image[first], image[second]
    return source, target, (step[first] + outside[target] - outside[source]) @ vectors


def _pairs(places: Tensor, is_home: Tensor, cutoff: float) -> tuple[Tensor, Tensor]:
    """Return pairs of places that may be near each other, whose second is a home."""
    dims = places.shape[1]
    if dims > 3 or find_spec("vesin") is None:
        homes = is_home.nonzero()[:, 0]
        pairs = [torch.empty(2, 0, dtype=torch.int64)]
        for some in homes.split(TARGETS):
            apart = torch.cdist(places, places[some], compute_mode="donot_use_mm_for_euclid_dist")
            first, second = (apart <= 1.000001 * cutoff).nonzero().T
            pairs.append(torch.stack([first, some[second]]))
        first, second = torch.cat(pairs, 1)
        keep = first != second
        return first[keep], second[keep]
    import vesin  # an extra; GPUs of its own it finds through cupy, which is not used here

    search: Any = vesin.NeighborList(
        cutoff=1.000001 * cutoff, full_list=True, n_threads=torch.get_num_threads()
    )
    space = torch.nn.functional.pad(places, (0, 3 - dims))
    first, second = search.compute(space.numpy(), space.new_zeros(3, 3).numpy(), False, "ij")
    first, second = (torch.from_numpy(n.astype("int64", copy=False)) for n in (first, second))
    keep = is_home[second]
    return first[keep], second[keep]


def _images(
    inside: Tensor,
    members: Tensor,
    homes: Tensor,
    cutoff: float,
    vectors: Tensor,
    repeats: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return for each image of a member near the homes its number and its steps, in cells."""
    inverse = torch.linalg.inv(vectors)
    fraction, around = inside[members] @ inverse, inside[homes] @ inverse
    # A little more than the cutoff: fractions are rounded, distances decide in the end.
    reach = 1.000001 * cutoff * inverse.norm(dim=0)  # in fractions of each vector
    low, high = around.min(0).values - reach, around.max(0).values + reach
    first = torch.where(repeats, (low - fraction).ceil(), 0.0)
    most = torch.where(repeats, (high - low).floor(), 0.0)
    ranges = [torch.arange(int(count) + 1) for count in most]
    steps = torch.cartesian_prod(*ranges).reshape(-1, len(ranges)).double()
    step = first[:, None] + steps
    moved = fraction[:, None] + step
    is_near = ((moved >= low) & (moved <= high)).all(2)
    return members[is_near.nonzero()[:, 0]], step[is_near]


def _cells(
    cell: Tensor | None, pbc: bool | Sequence[bool], dims: int, graphs: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the cells `[B, D, D]`, and for each vector whether things repeat along it.

    Where they do not, the vector stands square to the others: it only has to complete them.
    """
    if cell is None:
        return torch.eye(dims, dtype=torch.float64)[None], torch.zeros(dims, dtype=torch.bool)
    request = "radius_graph(cell=...)"
    expected = f"one cell [{dims}, {dims}], or one for each graph [B, {dims}, {dims}]"
    if cell.dim() not in (2, 3) or tuple(cell.shape[-2:]) != (dims, dims):
        problem = f"a cell of shape {list(cell.shape)} for points in {dims} dimensions"
        raise PartitionError.because(request, problem, None, expected)
    cells = cell.detach().cpu().double().reshape(-1, dims, dims).clone()
    count = int(graphs.max()) + 1 if len(graphs) else 1
    if cells.shape[0] not in (1, count):
        problem = f"{cells.shape[0]} cells for {count} graphs"
        raise PartitionError.because(request, problem, None, expected)
    if not bool(cells.isfinite().all()):
        raise PartitionError.because(request, "nan or infinity in it", None, "finite vectors")
    repeats = torch.tensor([pbc] * dims if isinstance(pbc, bool) else [bool(p) for p in pbc])
    if repeats.shape != (dims,):
        problem, hint = f"{len(repeats)} entries for {dims} vectors", "pbc=(True, True, False)"
        raise PartitionError.because("radius_graph(pbc=...)", problem, None, hint)
    kept = int(repeats.sum())
    for vectors in cells:
        periodic = vectors[repeats]
        spread = torch.linalg.svd(periodic)
        if kept and float(spread.S.min()) < 1e-9 * float(spread.S.max()) + 1e-12:
            raise PartitionError.because(
                request,
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
    request, hint = "radius_graph(targets=...)", "the numbers of points: mask.nonzero()[:, 0]"
    return points, integer_list(targets, "targets", request, hint, below=len(points))


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
