"""Orders of nodes in a line, and cuts of a line into parts of equal cost. Pure arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor

from unisono.errors import PartitionError

_BITS = 10


def morton_order(pos: Tensor, batch: Tensor | None = None) -> Tensor:
    """Return the order of nodes along a Morton curve, graph after graph.

    Args:
        pos: positions `[N, D]`, D from 1 to 3.
        batch: graph of each node `[N]`; default one graph.

    Returns:
        `[N]`, node numbers; near nodes in space are mostly near in it.
    """
    if pos.dim() != 2 or not 1 <= pos.shape[1] <= 3 or not pos.is_floating_point():
        raise PartitionError.because(
            "a Morton order",
            f"positions of shape {list(pos.shape)}, {pos.dtype}",
            None,
            "floating-point positions [N, 1], [N, 2] or [N, 3]",
        )
    if batch is not None and (batch.shape != pos.shape[:1] or batch.is_floating_point()):
        raise PartitionError.because(
            "a Morton order with a batch",
            f"batch of shape {list(batch.shape)}, {batch.dtype}; {pos.shape[0]} nodes",
            None,
            "one whole number a node",
        )
    points = pos.detach().cpu().double()
    if not points.isfinite().all():
        node = int((~points.isfinite()).any(1).nonzero()[0])
        raise PartitionError.because(
            "a Morton order", f"node {node} is at {points[node].tolist()}", None, "finite positions"
        )
    if points.shape[0] == 0:
        return torch.empty(0, dtype=torch.int64)
    low = points.min(0).values
    extent = float((points.max(0).values - low).max()) or 1.0  # one scale keeps near things near
    cells = ((points - low) / extent * 1023).floor().clamp(0, 1023).long()
    key = torch.zeros(points.shape[0], dtype=torch.int64)
    for bit in range(_BITS):
        for axis in range(cells.shape[1]):
            key |= ((cells[:, axis] >> bit) & 1) << (3 * bit + axis)
    order = key.sort(stable=True).indices
    if batch is not None:
        order = order[batch.detach().cpu()[order].sort(stable=True).indices]
    return order


def cut_by_cost(cost: Tensor, parts: int) -> Tensor:
    """Return for each item of a line the part it falls in, with parts of nearly equal cost.

    An item belongs where the middle of its cost lies: no part exceeds its share by more than the
    largest cost. All zero counts as all equal.

    >>> cut_by_cost(torch.tensor([1.0, 1.0, 1.0, 3.0]), 2).tolist()
    [0, 0, 0, 1]
    """
    cost = cost.detach().cpu().double()
    bad = (~cost.isfinite() | (cost < 0)).nonzero()
    if bad.numel():
        item = int(bad[0])
        raise PartitionError.because(
            f"a cut into {parts} parts by cost",
            f"cost {float(cost[item])} at {item}",
            None,
            "costs of 0 or more",
        )
    total = float(cost.sum())
    if total == 0:
        cost, total = torch.ones_like(cost), float(cost.numel())
    middle = cost.cumsum(0) - cost / 2
    return (parts * middle / total).floor().long().clamp(max=parts - 1)
