"""`GraphPartition`: which rank owns which node. Pure, the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import index
from typing import Literal

import torch
from torch import Tensor

from unisono.errors import PartitionError, an
from unisono.expect import expect_choice, expect_int
from unisono.graph_parallel.integers import (
    CHUNK,
    counts,
    distinct,
    marked,
    smallest_dtype,
    stable_order,
)
from unisono.graph_parallel.stats import GraphStats
from unisono.topology.decompose import bounds, check_within, split_sizes

TABLE = 8
"""Rows are marked in a table of parts and nodes if it has at most this many places for each; so
their list is never longer than a sorted one would be."""


@dataclass(frozen=True, eq=False)
class GraphPartition:
    """Owner of every node, and the order in which each rank's nodes stand together.

    Make one with `contiguous`, `morton`, `balanced` or `from_owner`.
    """

    owner: Tensor
    """`[N]`, int64: the part that owns each node."""
    perm: Tensor
    """`[N]`: nodes sorted by owner; `x[perm]` is the new order."""
    inverse: Tensor
    """`[N]`: place of each node in the new order; `x_new[inverse]` is the old order."""
    sizes: tuple[int, ...]
    """Nodes of each part."""
    offsets: tuple[int, ...]
    """Part p is rows `offsets[p]:offsets[p + 1]` of the new order."""

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return self.owner.numel()

    @property
    def parts(self) -> int:
        """Number of parts."""
        return len(self.sizes)

    @classmethod
    def contiguous(cls, num_nodes: int, parts: int) -> GraphPartition:
        """Return balanced blocks of nodes in the given order.

        >>> GraphPartition.contiguous(5, 3).owner.tolist()
        [0, 0, 1, 1, 2]
        """
        expect_int("num_nodes", num_nodes, 0, error=PartitionError)
        expect_int("parts", parts, 1, error=PartitionError)
        sizes = torch.tensor(split_sizes(num_nodes, parts), device="cpu")
        return cls.from_owner(torch.arange(parts, device="cpu").repeat_interleave(sizes), parts)

    @classmethod
    def morton(
        cls, pos: Tensor, parts: int, *, batch: Tensor | None = None, cost: Tensor | None = None
    ) -> GraphPartition:
        """Return parts that are compact in space: equal cuts of a Morton curve.

        Args:
            pos: positions `[N, D]`, D from 1 to 3.
            parts: number of parts.
            batch: graph of each node; graphs follow one another on the curve.
            cost: work of each node `[N]`; default equal.
        """
        expect_int("parts", parts, 1, error=PartitionError)
        order = morton_order(pos, batch)
        return cls._cut(order, _costs(cost, order.numel()), parts)

    @classmethod
    def balanced(
        cls,
        edge_index: Tensor,
        num_nodes: int,
        parts: int,
        *,
        order: Literal["index", "morton"] = "index",
        pos: Tensor | None = None,
        node_cost: float = 1.0,
        edge_cost: float = 1.0,
    ) -> GraphPartition:
        """Return parts of equal work, where the work of a node is mostly its incoming edges.

        Args:
            edge_index: `[2, E]`, source and target of each edge.
            num_nodes: number of nodes.
            parts: number of parts.
            order: `"index"` cuts the nodes as they are numbered, `"morton"` along a curve in space.
            pos: positions, for `order="morton"`.
            node_cost: work of a node by itself.
            edge_cost: work of an incoming edge.
        """
        expect_int("num_nodes", num_nodes, 0, error=PartitionError)
        expect_int("parts", parts, 1, error=PartitionError)
        check_edges(edge_index, num_nodes, "GraphPartition.balanced")
        expect_choice("order", order, ("index", "morton"), error=PartitionError)
        if order == "morton" and pos is None:
            raise PartitionError.because(
                'GraphPartition.balanced(order="morton")', "no positions", None, "pos=pos"
            )
        indegree = torch.bincount(edge_index[1].cpu(), minlength=num_nodes)
        if pos is None or order == "index":
            line = torch.arange(num_nodes, device="cpu")
        else:
            line = morton_order(pos)
        if line.numel() != num_nodes:
            raise PartitionError.because(
                f"GraphPartition.balanced of {num_nodes} nodes", f"{line.numel()} positions"
            )
        return cls._cut(line, node_cost + edge_cost * indegree.double(), parts)

    @classmethod
    def from_owner(cls, owner: Tensor | Sequence[int], parts: int) -> GraphPartition:
        """Return the partition with this owner for each node `[N]`; any, parts may be empty.

        >>> GraphPartition.from_owner([1, 0, 1], 2).perm.tolist()
        [1, 0, 2]
        """
        request = f"GraphPartition.from_owner(parts={parts})"
        expect_int("parts", parts, 1, error=PartitionError)
        hint = "a part for each node: [0, 0, 1]"
        owner = integer_list(owner, "owner", request, hint, below=parts).clone()
        perm = stable_order(owner, parts)
        inverse = torch.empty_like(perm)
        inverse[perm] = torch.arange(perm.numel(), device="cpu")
        sizes = counts(owner, parts)
        return cls(owner, perm, inverse, sizes, bounds(sizes))

    def nodes_of(self, part: int) -> Tensor:
        """Return the nodes of a part, in its order."""
        check_within(
            f"nodes_of({part!r}) of a partition of {self.parts} parts", index(part), self.parts
        )
        return self.perm[self.offsets[part] : self.offsets[part + 1]]

    def stats(self, edge_index: Tensor) -> GraphStats:
        """Return what this split of the graph costs."""
        check_edges(edge_index, self.num_nodes, "GraphPartition.stats")
        source, target = edge_index.cpu()
        computes = self.owners_of(target)
        fetcher, _, cut = self.fetched(source, computes)
        return GraphStats(
            edges_total=len(target),
            edges_cut=cut,
            nodes_per_rank=self.sizes,
            edges_per_rank=counts(computes, self.parts),
            halo_per_rank=counts(fetcher, self.parts),
        )

    def owners_of(self, nodes: Tensor) -> Tensor:
        """Return the part of each of some nodes on the CPU, in as few bytes as hold it."""
        return self._short_owner.index_select(0, nodes)

    @cached_property
    def _short_owner(self) -> Tensor:
        return self.owner.to(smallest_dtype(self.parts))

    def fetched(self, source: Tensor, computes: Tensor) -> tuple[Tensor, Tensor, int]:
        """Return which foreign rows some edges need, and how many edges need one.

        Args:
            source: `[E]`, where each edge begins, on the CPU.
            computes: `[E]`, the part that computes each edge: `owners_of` its target.

        Returns:
            The part that fetches and the place in the new order of the node, for each such row
            once, sorted by both; and the number of edges with a foreign source.
        """
        cut = marked(self.owners_of(source) != computes)
        parts, nodes = self.parts, max(self.num_nodes, 1)
        if parts * nodes > TABLE * (cut.numel() + 1):
            keys = self.inverse.index_select(0, source.index_select(0, cut))
            keys.add_(computes.index_select(0, cut), alpha=nodes)
            rows = distinct(keys)
            return rows // nodes, rows % nodes, cut.numel()
        table = torch.zeros(parts * nodes, dtype=torch.bool, device="cpu")
        for some in cut.split(CHUNK):
            keys = source.index_select(0, some)
            keys.add_(computes.index_select(0, some), alpha=nodes)
            table.index_fill_(0, keys, True)
        table = table.view(parts, nodes).index_select(1, self.perm)
        fetcher = torch.arange(parts, device="cpu").repeat_interleave(table.sum(1))
        return fetcher, marked(table.view(-1)).sub_(fetcher, alpha=nodes), cut.numel()

    @classmethod
    def _cut(cls, order: Tensor, cost: Tensor, parts: int) -> GraphPartition:
        owner = torch.empty_like(order)
        owner[order] = cut_by_cost(cost[order], parts)
        return cls.from_owner(owner, parts)


def check_edges(edge_index: Tensor, num_nodes: int, request: str) -> None:
    """Raise unless `edge_index` is `[2, E]`, int64, with nodes of the graph only."""
    hint = "torch.tensor(edge_index), [2, E] of torch.int64: sources and targets"
    if not isinstance(edge_index, Tensor):
        problem = f"edge_index is {an(type(edge_index).__name__)}"
        raise PartitionError.because(request, problem, None, hint)
    if edge_index.dim() != 2 or edge_index.shape[0] != 2 or edge_index.dtype != torch.int64:
        problem = f"edge_index of shape {list(edge_index.shape)}, {edge_index.dtype}"
        raise PartitionError.because(request, problem, None, hint)
    if edge_index.numel() == 0:
        return
    low, high = edge_index.aminmax()
    if low < 0 or high >= num_nodes:
        column = int(((edge_index < 0) | (edge_index >= num_nodes)).any(0).nonzero()[0])
        edge = edge_index[:, column].tolist()
        node = next(node for node in edge if not 0 <= node < num_nodes)
        raise PartitionError.because(
            request,
            f"edge {column} is {edge[0]} -> {edge[1]} in a graph of {num_nodes} nodes",
            f"not 0 <= {node} < {num_nodes}",
            "node numbers count from 0",
        )


def integer_list(
    given: object, name: str, asked: str, hint: str, *, below: float = math.inf
) -> Tensor:
    """Return integers in `[0, below)` as int64 on the CPU; masks and fractions are refused."""
    try:
        numbers = torch.as_tensor(given).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        raise PartitionError.because(asked, f"{name}={given!r:.80}", None, hint) from None
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
    outside = ((numbers < 0) | (numbers >= below)).nonzero()
    if outside.numel():
        place = int(outside[0])
        found = f"{name}[{place}] = {int(numbers[place])}"
        limit = "" if below == math.inf else f" < {below}"
        raise PartitionError.because(asked, found, f"not 0 <= {int(numbers[place])}{limit}", hint)
    return numbers.long()


def finite_points(pos: Tensor, request: str, hint: str, most_dims: float = math.inf) -> Tensor:
    """Return positions `[N, D]` as float64 on the CPU; raise unless they are finite points."""
    if pos.dim() != 2 or not 1 <= pos.shape[1] <= most_dims or not pos.is_floating_point():
        problem = f"positions of shape {list(pos.shape)}, {pos.dtype}"
        raise PartitionError.because(request, problem, None, hint)
    points = pos.detach().cpu().double()
    if not points.isfinite().all():
        node = int((~points.isfinite()).any(1).nonzero()[0])
        problem = f"point {node} is at {points[node].tolist()}"
        raise PartitionError.because(request, problem, None, "finite positions")
    return points


def _costs(cost: Tensor | None, nodes: int) -> Tensor:
    if cost is None:
        return torch.ones(nodes, dtype=torch.float64, device="cpu")
    if cost.shape != (nodes,):
        raise PartitionError.because(
            f"a cost for each of {nodes} nodes", f"shape {list(cost.shape)}", None, f"[{nodes}]"
        )
    return cost.cpu().double()


_SPREAD = ((16, 0x030000FF), (8, 0x0300F00F), (4, 0x030C30C3), (2, 0x09249249))
"""Of the ten bits of a coordinate."""


def morton_order(pos: Tensor, batch: Tensor | None = None) -> Tensor:
    """Return the order of nodes along a Morton curve, graph after graph.

    Args:
        pos: positions `[N, D]`, D from 1 to 3.
        batch: graph of each node `[N]`; default one graph.

    Returns:
        `[N]`, node numbers; near nodes in space are mostly near in it.
    """
    hint = "floating-point positions [N, 1], [N, 2] or [N, 3]"
    points = finite_points(pos, "a Morton order", hint, most_dims=3)
    if batch is not None and (batch.shape != pos.shape[:1] or batch.is_floating_point()):
        raise PartitionError.because(
            "a Morton order with a batch",
            f"batch of shape {list(batch.shape)}, {batch.dtype}; {pos.shape[0]} nodes",
            None,
            "one integer per node",
        )
    if points.shape[0] == 0:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    low = points.min(0).values
    extent = float((points.max(0).values - low).max()) or 1.0  # one scale keeps near things near
    cells = ((points - low) / extent * 1023).floor().clamp(0, 1023).long()
    key = torch.zeros(points.shape[0], dtype=torch.int64, device="cpu")
    for axis in range(cells.shape[1]):
        spread = cells[:, axis].contiguous()
        for shift, kept in _SPREAD:  # bit n moves to 3 n, half of the bits at a time
            spread = (spread | (spread << shift)).bitwise_and_(kept)
        key |= spread << axis
    order = stable_order(key, 1 << 30)
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
