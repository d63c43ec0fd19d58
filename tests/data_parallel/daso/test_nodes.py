"""Which ranks form nodes and global groups."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.data_parallel.daso.exchange import NodeLayout
from unisono.errors import MeshError


def test_nodes_follow_hostnames_even_when_ranks_alternate():
    layout = NodeLayout.of_hosts(["b", "a", "b", "a"])
    assert layout.nodes == ((0, 2), (1, 3))
    assert layout.groups == ((0, 1), (2, 3))
    assert layout.weights == (1.0, 1.0)
    assert [layout.node_of(rank) for rank in range(4)] == [0, 1, 0, 1]


def test_uneven_nodes_have_as_many_groups_as_the_smallest_node_has_ranks():
    layout = NodeLayout.of_blocks(6, [1, 3, 2])
    assert layout.nodes == ((0,), (1, 2, 3), (4, 5))
    assert layout.groups == ((0, 1, 4),)
    assert layout.weights == (0.5, 1.5, 1.0)


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12))
def test_every_rank_is_in_one_node_and_weights_add_up_to_the_number_of_nodes(hosts):
    layout = NodeLayout.of_hosts(hosts)
    assert sorted(rank for node in layout.nodes for rank in node) == list(range(len(hosts)))
    assert [node[0] for node in layout.nodes] == sorted(node[0] for node in layout.nodes)
    assert sum(layout.weights) == pytest.approx(len(layout.nodes))
    for group in layout.groups:
        assert [layout.node_of(rank) for rank in group] == list(range(len(layout.nodes)))
    flat = [rank for group in layout.groups for rank in group]
    assert len(set(flat)) == len(flat)


@pytest.mark.parametrize(
    ("ranks_per_node", "arithmetic"),
    [(3, "4 / 3"), (0, "4 / 0"), ([1, 2], "1 \\+ 2 = 3"), ([4, 0], "= 4"), ([], "= 0")],
)
def test_blocks_that_do_not_make_up_the_ranks_are_refused_with_the_arithmetic(
    ranks_per_node, arithmetic
):
    with pytest.raises(MeshError, match=arithmetic):
        NodeLayout.of_blocks(4, ranks_per_node)


def test_equal_blocks_of_consecutive_ranks():
    assert NodeLayout.of_blocks(4, 2).nodes == ((0, 1), (2, 3))
    assert NodeLayout.of_blocks(3, 1).groups == ((0, 1, 2),)
    assert NodeLayout.of_blocks(3, 3).groups == ((0,), (1,), (2,))
