"""Partitions are arithmetic: every node owned once, equal costs, compact parts, clear refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.errors import PartitionError
from unisono.graph_parallel import GraphPartition, radius_graph
from unisono.graph_parallel.partition import cut_by_cost, morton_order
from unisono.graph_parallel.stats import comparison

COUNTS = st.integers(0, 40)
PARTS = st.integers(1, 7)


def drawn(*shape, seed=0):
    return torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def graph(nodes, edges, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, max(nodes, 1), (2, edges if nodes else 0), generator=generator)


def check_consistent(part, nodes, parts):
    assert (part.num_nodes, part.parts) == (nodes, parts)
    assert sum(part.sizes) == nodes
    assert part.offsets == tuple(torch.tensor([0, *part.sizes]).cumsum(0).tolist())
    x = torch.arange(nodes)
    assert torch.equal(x[part.perm][part.inverse], x)
    for p in range(parts):
        own = part.nodes_of(p)
        assert torch.equal(own, (part.owner == p).nonzero()[:, 0])


@settings(deadline=None, max_examples=12)
@given(nodes=COUNTS, parts=PARTS, seed=st.integers(0, 99))
def test_every_node_has_one_owner_and_the_order_can_be_undone(nodes, parts, seed):
    edges = graph(nodes, 3 * nodes, seed)
    pos = drawn(nodes, 3, seed=seed)
    batch = torch.arange(nodes) // 5
    for part in (
        GraphPartition.contiguous(nodes, parts),
        GraphPartition.morton(pos, parts),
        GraphPartition.morton(pos[:, :1], parts, batch=batch, cost=drawn(nodes, seed=seed)),
        GraphPartition.balanced(edges, nodes, parts),
        GraphPartition.balanced(edges, nodes, parts, order="morton", pos=pos, node_cost=0.0),
        GraphPartition.from_owner(torch.randint(0, parts, (nodes,)), parts),
    ):
        check_consistent(part, nodes, parts)
        stats = part.stats(edges)
        assert sum(stats.edges_per_rank) == stats.edges_total == edges.shape[1]
        assert stats.halo_bytes(8) <= stats.gather_bytes(8)
        brute = [
            len({s for s, d in edges.T.tolist() if part.owner[d] == p != part.owner[s]})
            for p in range(parts)
        ]
        assert list(stats.halo_per_rank) == brute


@settings(deadline=None, max_examples=40)
@given(costs=st.lists(st.integers(0, 20), min_size=1, max_size=60), parts=PARTS)
def test_no_part_exceeds_its_share_by_more_than_one_item(costs, parts):
    cost = torch.tensor(costs, dtype=torch.float64)
    owner = cut_by_cost(cost, parts)
    assert bool((owner.diff() >= 0).all())
    assert 0 <= int(owner.min()) <= int(owner.max()) < parts
    sums = torch.bincount(owner, weights=cost, minlength=parts)
    assert float(sums.max()) <= float(cost.sum()) / parts + float(cost.max()) + 1e-9


@settings(deadline=None, max_examples=40)
@given(nodes=COUNTS, parts=PARTS)
def test_equal_costs_give_sizes_that_differ_by_at_most_one(nodes, parts):
    sizes = torch.bincount(cut_by_cost(torch.zeros(nodes), parts), minlength=parts)
    assert int(sizes.max() - sizes.min()) <= 1
    wanted = [nodes // parts + (p < nodes % parts) for p in range(parts)]
    assert list(GraphPartition.contiguous(nodes, parts).sizes) == wanted


def test_morton_keys_interleave_the_axes_and_graphs_follow_one_another():
    corners = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * 3)
    keys = (corners * torch.tensor([1.0, 2.0, 4.0])).sum(1)  # x is the lowest bit
    assert torch.equal(morton_order(corners), keys.sort().indices)
    batch = torch.tensor([1, 0] * 4)
    ordered = batch[morton_order(corners, batch)]
    assert bool((ordered.diff() >= 0).all())
    assert morton_order(torch.zeros(3, 2)).tolist() == [0, 1, 2]


def test_morton_parts_are_compact():
    nodes = 4000
    pos = drawn(nodes, 3)
    cutoff = (11 / nodes / (4 / 3 * math.pi)) ** (1 / 3)
    edges = radius_graph(pos, cutoff).edge_index
    cuts = {
        "index": GraphPartition.contiguous(nodes, 4).stats(edges),
        "morton": GraphPartition.morton(pos, 4).stats(edges),
    }
    assert cuts["morton"].edge_cut < 0.25 * cuts["index"].edge_cut
    text = comparison(cuts)
    assert text.splitlines()[1].startswith("index ")
    assert "the halo is" in cuts["morton"].table()


def test_balanced_parts_have_equal_edges_where_contiguous_ones_do_not():
    nodes = 2000
    degree = (2000 / torch.arange(1, nodes + 1, dtype=torch.float64)).ceil().long()
    target = torch.arange(nodes).repeat_interleave(degree)
    edges = torch.stack([torch.randint(0, nodes, target.shape), target])
    assert GraphPartition.contiguous(nodes, 4).stats(edges).edge_imbalance > 2
    assert GraphPartition.balanced(edges, nodes, 4, node_cost=0.0).stats(edges).edge_imbalance < 1.2
    stats = GraphPartition.balanced(edges, nodes, 4).stats(edges)
    cost = [n + e for n, e in zip(stats.nodes_per_rank, stats.edges_per_rank, strict=True)]
    assert max(cost) / (sum(cost) / 4) < 1.1


def test_results_do_not_depend_on_the_order_of_edges():
    edges = graph(30, 100)
    other = edges[:, torch.randperm(100, generator=torch.Generator().manual_seed(1))]
    a, b = (GraphPartition.balanced(e, 30, 3) for e in (edges, other))
    assert torch.equal(a.owner, b.owner)
    assert a.stats(edges) == b.stats(other)


def test_bad_partitions_are_refused_with_the_first_bad_entry():
    edges = torch.tensor([[0, 1], [1, 4]])
    with pytest.raises(PartitionError, match=r"edge 1 is 1 -> 4 in a graph of 4 nodes"):
        GraphPartition.balanced(edges, 4, 2)
    for bad in (edges.int(), edges[0], edges[:1], edges.double()):
        with pytest.raises(PartitionError, match=r"\[2, E\] of torch.int64"):
            GraphPartition.contiguous(5, 2).stats(bad)
    with pytest.raises(PartitionError, match=r"owner\[2\] = 3\n.*not 0 <= 3 < 3"):
        GraphPartition.from_owner(torch.tensor([0, 1, 3]), 3)
    for bad in (torch.zeros(3), torch.zeros(3, 1, dtype=torch.int64)):
        with pytest.raises(PartitionError, match="owner of shape"):
            GraphPartition.from_owner(bad, 2)
    with pytest.raises(PartitionError, match=r"owner\[1\] = 5"):
        GraphPartition.from_owner([0, 5, 0], 2)
    assert GraphPartition.from_owner([1, 0, 1], 2).sizes == (1, 2)
    for value in (float("nan"), float("inf")):
        with pytest.raises(PartitionError, match="point 1 is at"):
            GraphPartition.morton(torch.tensor([[0.0, 0], [1.0, value]]), 2)
    with pytest.raises(PartitionError, match="no positions"):
        GraphPartition.balanced(edges, 5, 2, order="morton")
    with pytest.raises(PartitionError, match="cost -1"):
        GraphPartition.morton(torch.zeros(2, 3), 2, cost=torch.tensor([1.0, -1.0]))
    for nodes, parts in ((4, 0), (4, -1), (4, 1.5), (2.5, 2), ("4", 2), (-1, 2)):
        with pytest.raises((PartitionError, TypeError), match=r"parts|num_nodes"):
            GraphPartition.contiguous(nodes, parts)
    with pytest.raises(PartitionError, match="edge_index is a list"):
        GraphPartition.balanced(edges.tolist(), 5, 2)
    with pytest.raises(PartitionError, match=r"owner=\['a'\]"):
        GraphPartition.from_owner(["a"], 2)


def test_only_parts_that_exist_have_nodes():
    part = GraphPartition.contiguous(5, 2)
    assert part.nodes_of(np.int64(1)).tolist() == [3, 4]
    for wrong in (-1, 2):
        with pytest.raises(PartitionError, match="a partition of 2 parts"):
            part.nodes_of(wrong)
    with pytest.raises(TypeError):
        part.nodes_of(0.5)
