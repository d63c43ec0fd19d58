"""`radius_graph`: all pairs of points within a cutoff, by a cell list in pure torch."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from unisono.errors import PartitionError


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
    batch: Tensor | None = None,
    targets: Tensor | None = None,
) -> Neighbours:
    """Return the edges from all points within `cutoff` of each target. Local, no gradient.

    Args:
        pos: `[N, D]`, in one dimension or more.
        cutoff: largest distance; points exactly there count.
        cell: rows are the vectors of a periodic cell, `[D, D]`, or `[B, D, D]` with `batch`. Then
            a point may be its own neighbour through an image.
        batch: graph of each point `[N]`; points of different graphs are never neighbours.
        targets: points that need their neighbours, such as a rank's own nodes; default all.

    >>> radius_graph(torch.tensor([[0.0, 0, 0], [1, 0, 0], [3, 0, 0]]), 1.5).edge_index.tolist()
    [[1, 0], [0, 1]]
    >>> radius_graph(torch.tensor([[0.0, 0], [1, 0], [1, 1]]), 1.0).edge_index.tolist()
    [[1, 0, 2, 1], [0, 1, 1, 2]]
    """
    points, wanted = _checked(pos, cutoff, targets)
    graphs = _graphs(batch, len(points))
    images, shifts = _images(points, cutoff, cell, graphs)
    image, target = _near_cells(points, wanted, images, shifts, cutoff, graphs)
    source = images[image]
    apart = points[source] + shifts[image] - points[target]
    keep = apart.square().sum(1) <= cutoff * cutoff
    keep &= (source != target) | (shifts[image] != 0).any(1)
    source, target, shift = source[keep], target[keep], shifts[image][keep]
    order = (target * max(len(points), 1) + source).sort(stable=True).indices
    edges = torch.stack([source, target])[:, order]
    return Neighbours(edges.to(pos.device), shift[order].to(pos.device, pos.dtype))


def _near_cells(
    points: Tensor, wanted: Tensor, images: Tensor, shifts: Tensor, cutoff: float, graphs: Tensor
) -> tuple[Tensor, Tensor]:
    """Return pairs (number of image, target) whose cells of side `cutoff` touch.

    Cells divide the widest dims, three at most: each dim more has three times as many neighbours.
    """
    if len(images) == 0 or len(wanted) == 0:
        return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
    where = points[images] + shifts
    widest = (where.max(0).values - where.min(0).values).argsort(descending=True)[:3]
    where, homes = where[:, widest], points[wanted][:, widest]
    dims = len(widest)
    low = where.min(0).values
    cells = ((where - low) / cutoff).floor().long()
    extent = (cells.max(0).values + 3).tolist()  # a free layer each side: cells never wrap
    stride = torch.tensor([math.prod(extent[d + 1 :]) for d in range(dims)])
    volume = math.prod(extent)

    def key_of(cell: Tensor, graph: Tensor) -> Tensor:
        return ((cell + 1) * stride).sum(1) + graph * volume

    keys, by_cell = key_of(cells, graphs[images]).sort(stable=True)
    home = ((homes - low) / cutoff).floor().long()
    steps = torch.cartesian_prod(*[torch.tensor([-1, 0, 1])] * dims).reshape(-1, dims)
    near = len(steps)
    around = key_of(
        (home[:, None] + steps).reshape(-1, dims), graphs[wanted].repeat_interleave(near)
    )
    first, last = torch.searchsorted(keys, around), torch.searchsorted(keys, around, right=True)
    counts = last - first
    start = (counts.cumsum(0) - counts).repeat_interleave(counts)
    place = torch.arange(int(counts.sum())) - start + first.repeat_interleave(counts)
    return by_cell[place], wanted.repeat_interleave(near).repeat_interleave(counts)


def _images(
    points: Tensor, cutoff: float, cell: Tensor | None, graphs: Tensor
) -> tuple[Tensor, Tensor]:
    """Return for each image of a point its number and its shift."""
    dims = points.shape[1]
    if cell is None:
        return torch.arange(len(points)), torch.zeros(len(points), dims, dtype=points.dtype)
    wanted = f"one cell [{dims}, {dims}], or one for each graph [B, {dims}, {dims}]"
    if cell.dim() not in (2, 3) or tuple(cell.shape[-2:]) != (dims, dims):
        found = f"a cell of shape {list(cell.shape)} for points in {dims} dimensions"
        raise PartitionError.because("radius_graph(cell=...)", found, None, wanted)
    cells = cell.detach().cpu().double().reshape(-1, dims, dims)
    count = int(graphs.max()) + 1 if len(graphs) else 0
    if cells.shape[0] not in (1, max(count, 1)):
        found = f"{cells.shape[0]} cells for {count} graphs"
        raise PartitionError.because("radius_graph(cell=...)", found, None, wanted)
    if bool((torch.linalg.det(cells).abs() < 1e-12).any()):
        raise PartitionError.because(
            "radius_graph(cell=...)",
            "the vectors span no volume",
            None,
            f"{dims} vectors that do not lie in one plane",
        )
    numbers: list[Tensor] = []
    shifts: list[Tensor] = []
    for graph in range(count):
        vectors = cells[graph % cells.shape[0]]
        mine = (graphs == graph).nonzero()[:, 0]
        if not len(mine):
            continue
        inverse = torch.linalg.inv(vectors)
        fraction = points[mine] @ inverse
        reach = cutoff * inverse.norm(dim=0)  # in fractions of each vector
        low, high = fraction.min(0).values - reach, fraction.max(0).values + reach
        first = (low - fraction.max(0).values).floor().long()
        last = (high - fraction.min(0).values).ceil().long()
        ranges = [torch.arange(int(a), int(b) + 1) for a, b in zip(first, last, strict=True)]
        steps = torch.cartesian_prod(*ranges).reshape(-1, dims).double()
        moved = fraction[:, None] + steps
        inside = ((moved >= low) & (moved <= high)).all(2)
        point, step = inside.nonzero(as_tuple=True)
        numbers.append(mine[point])
        shifts.append(steps[step] @ vectors)
    if not numbers:
        return torch.empty(0, dtype=torch.int64), torch.empty(0, dims, dtype=points.dtype)
    return torch.cat(numbers), torch.cat(shifts)


def _checked(pos: Tensor, cutoff: float, targets: Tensor | None) -> tuple[Tensor, Tensor]:
    if pos.dim() != 2 or pos.shape[1] < 1 or not pos.is_floating_point():
        raise PartitionError.because(
            "radius_graph",
            f"positions of shape {list(pos.shape)}, {pos.dtype}",
            None,
            "[N, D], floating point: a row for each point; pos[:, None] on a line",
        )
    if not cutoff > 0:
        raise PartitionError.because(f"radius_graph(cutoff={cutoff})", None, None, "cutoff > 0")
    points = pos.detach().cpu().double()
    if not bool(points.isfinite().all()):
        node = int((~points.isfinite()).any(1).nonzero()[0])
        raise PartitionError.because("radius_graph", f"point {node} is at {points[node].tolist()}")
    if targets is None:
        return points, torch.arange(len(points))
    wanted = _whole_numbers(targets, "targets", "the numbers of points: mask.nonzero()[:, 0]")
    if wanted.numel() and not 0 <= int(wanted.min()) <= int(wanted.max()) < len(points):
        raise PartitionError.because(
            "radius_graph(targets=...)",
            f"targets from {int(wanted.min())} to {int(wanted.max())}, {len(points)} points",
        )
    return points, wanted


def _graphs(batch: Tensor | None, points: int) -> Tensor:
    """Return the graph of each point."""
    if batch is None:
        return torch.zeros(points, dtype=torch.int64)
    hint = "the number of its graph for each point, from 0 on"
    graphs = _whole_numbers(batch, "batch", hint)
    if len(graphs) != points:
        raise PartitionError.because(
            "radius_graph(batch=...)",
            f"graphs of {len(graphs)} points, {points} points",
            f"{len(graphs)} != {points}",
            hint,
        )
    if points and int(graphs.min()) < 0:
        point = int((graphs < 0).nonzero()[0])
        found = f"point {point} is in graph {int(graphs[point])}"
        raise PartitionError.because("radius_graph(batch=...)", found, None, hint)
    return graphs


def _whole_numbers(given: object, name: str, hint: str) -> Tensor:
    """Return a list of integers as int64 on the CPU; masks and fractions are refused."""
    asked = f"radius_graph({name}=...)"
    try:
        numbers = torch.as_tensor(given).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        raise PartitionError.because(asked, f"{given!r:.80}", None, hint) from None
    if numbers.dim() == 1 and numbers.numel() == 0:
        return numbers.long()  # an empty list is one of floats to torch
    is_whole = not (numbers.is_floating_point() or numbers.is_complex())
    if numbers.dim() != 1 or not is_whole or numbers.dtype == torch.bool:
        raise PartitionError.because(
            asked,
            f"{name} of shape {list(numbers.shape)}, {numbers.dtype}",
            "a list of integers has 1 dim and an integer dtype",
            hint,
        )
    return numbers.long()
