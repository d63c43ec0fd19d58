"""Which rows each rank fetches and sends, from an edge list. Pure, no loop over edges.

Numbers of nodes are those of the new order (grouped by owner) unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.errors import PartitionError
from unisono.graph_parallel.partition import GraphPartition


@dataclass(frozen=True, eq=False)
class HaloLists:
    """The lists of one rank."""

    edge_ids: Tensor
    """Columns of the given edge list that this rank computes, ascending."""
    ends: Tensor
    """`[2, E_r]`: their sources and targets, new order."""
    halo: Tensor
    """Foreign nodes among the ends, ascending: grouped by owner."""
    halo_sizes: tuple[int, ...]
    """How many of them each rank owns."""
    sends: Tensor
    """Own nodes that others fetch, grouped by the rank that does, ascending in each group."""
    send_sizes: tuple[int, ...]
    """How many each rank fetches."""
    halo_per_rank: tuple[int, ...]
    """Halo rows of every rank."""
    edges_per_rank: tuple[int, ...]
    """Edges of every rank."""
    edges_cut: int
    """Edges of all ranks with a foreign end."""


def from_all_edges(
    part: GraphPartition, edge_index: Tensor, edge_owner: Tensor, rank: int
) -> HaloLists:
    """Return the lists when every rank knows all edges: nothing has to be asked.

    Args:
        part: owners of the nodes.
        edge_index: all edges `[2, E]`, original node numbers.
        edge_owner: the rank that computes each edge `[E]`.
        rank: whose lists.
    """
    nodes, parts = part.num_nodes, part.parts
    foreign = [(edge_owner != part.owner[end]).nonzero()[:, 0] for end in edge_index]
    wanted = [
        edge_owner[cut] * nodes + part.inverse[end[cut]]
        for cut, end in zip(foreign, edge_index, strict=True)
    ]
    pairs = torch.unique(torch.cat(wanted))  # sorted: by the rank that fetches, then by node
    fetcher, node = pairs // max(nodes, 1), pairs % max(nodes, 1)
    halo = node[fetcher == rank]
    own = (node >= part.offsets[rank]) & (node < part.offsets[rank + 1])
    edge_ids = (edge_owner == rank).nonzero()[:, 0]
    return HaloLists(
        edge_ids=edge_ids,
        ends=part.inverse[edge_index[:, edge_ids]],
        halo=halo,
        halo_sizes=_counts(_owners(part, halo), parts),
        sends=node[own],
        send_sizes=_counts(fetcher[own], parts),
        halo_per_rank=_counts(fetcher, parts),
        edges_per_rank=_counts(edge_owner, parts),
        edges_cut=int(_any_of(foreign, edge_index.shape[1])),
    )


def from_own_edges(
    part: GraphPartition,
    edge_index: Tensor,
    rank: int,
    all_gather_ints: Callable[[list[int]], list[tuple[int, ...]]],
    all_to_all: Callable[[Tensor, tuple[int, ...], tuple[int, ...]], Tensor],
) -> HaloLists:
    """Return the lists when each rank knows its own edges only: two exchanges ask the others.

    Args:
        part: owners of the nodes.
        edge_index: own edges `[2, E_r]`, original node numbers.
        rank: whose lists.
        all_gather_ints: tells all ranks some integers.
        all_to_all: moves rows between ranks, with send and receive sizes.
    """
    foreign = [(part.owner[end] != rank).nonzero()[:, 0] for end in edge_index]
    wanted = [part.inverse[end[cut]] for cut, end in zip(foreign, edge_index, strict=True)]
    halo = torch.unique(torch.cat(wanted))
    halo_sizes = _counts(_owners(part, halo), part.parts)
    edges = edge_index.shape[1]
    told = all_gather_ints([*halo_sizes, edges, int(_any_of(foreign, edges))])
    send_sizes = tuple(row[rank] for row in told)
    return HaloLists(
        edge_ids=torch.arange(edges),
        ends=part.inverse[edge_index],
        halo=halo,
        halo_sizes=halo_sizes,
        sends=all_to_all(halo, halo_sizes, send_sizes),
        send_sizes=send_sizes,
        halo_per_rank=tuple(sum(row[:-2]) for row in told),
        edges_per_rank=tuple(row[-2] for row in told),
        edges_cut=sum(row[-1] for row in told),
    )


def check_own_targets(part: GraphPartition, edge_index: Tensor, rank: int) -> None:
    """Raise unless this rank owns the target of each of its edges."""
    strange = (part.owner[edge_index[1]] != rank).nonzero()
    if strange.numel():
        column = int(strange[0])
        source, target = edge_index[:, column].tolist()
        raise PartitionError.because(
            'GraphPlan(edges="local")',
            f"edge {column} is {source} -> {target}, on rank {rank}",
            f"node {target} is owned by rank {int(part.owner[target])}, not {rank}",
            "each rank passes the edges that end in its own nodes",
        )


def _owners(part: GraphPartition, nodes: Tensor) -> Tensor:
    return part.owner[part.perm[nodes]]


def _counts(values: Tensor, parts: int) -> tuple[int, ...]:
    return tuple(torch.bincount(values, minlength=parts).tolist())


def _any_of(foreign: list[Tensor], edges: int) -> int:
    sources, targets = foreign
    if targets.numel() == 0:
        return sources.numel()
    flags = torch.zeros(edges, dtype=torch.bool)
    flags[sources] = flags[targets] = True
    return int(flags.sum())
