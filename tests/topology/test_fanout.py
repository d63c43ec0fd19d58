"""Who talks to whom in broadcast and sum-reduce: the table worked out by hand, and its errors."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.topology import Mesh, Partition, broadcast_groups, reduce_groups
from unisono.topology.decompose import grid_index


def layout(shape: list[int], first: int = 0) -> SimpleNamespace:
    count = math.prod(shape)
    return SimpleNamespace(shape=tuple(shape), ranks=tuple(range(first, first + count)))


TABLE = [
    (layout([1, 2]), layout([3, 2]), {}, {0: [0, 2, 4], 1: [1, 3, 5]}),
    (layout([2, 1]), layout([2, 3]), {}, {0: [0, 1, 2], 1: [3, 4, 5]}),
    (layout([2]), layout([3, 2]), {}, {0: [0, 2, 4], 1: [1, 3, 5]}),
    (layout([1]), layout([2, 2]), {}, {0: [0, 1, 2, 3]}),
    (layout([1, 2], first=4), layout([2, 2]), {}, {4: [0, 2], 5: [1, 3]}),
    (layout([2, 1]), layout([3, 2]), {"transpose_src": True}, {0: [0, 2, 4], 1: [1, 3, 5]}),
    (layout([1, 2]), layout([2, 3]), {"transpose_dest": True}, {0: [0, 1, 2], 1: [3, 4, 5]}),
]  # fmt: skip


@pytest.mark.parametrize(("src", "dest", "flags", "who"), TABLE)
def test_broadcast_row_of_the_table(src, dest, flags, who) -> None:
    groups = broadcast_groups(src, dest, **flags)
    assert {group.root: list(group.peers) for group in groups} == who
    for group in groups:
        assert group.members[0] == group.root
        assert set(group.members) == {group.root, *group.peers}
        assert len(set(group.members)) == len(group.members)
    assert [group.root for group in groups] == list(src.ranks)


def test_transposed_source_sends_block_ij_to_ji() -> None:
    groups = broadcast_groups(layout([2, 3]), layout([3, 2]), transpose_src=True)
    assert {group.root: group.peers for group in groups} == {
        0: (0,), 1: (2,), 2: (4,), 3: (1,), 4: (3,), 5: (5,),
    }  # fmt: skip
    assert groups[1].members == (1, 2), "the root is in the process group, but not a peer"


def test_sum_reduce_reads_the_relation_backwards() -> None:
    groups = reduce_groups(layout([3, 2]), layout([1, 3]), transpose_src=True)
    assert {group.root: group.peers for group in groups} == {0: (0, 1), 1: (2, 3), 2: (4, 5)}
    assert groups[1].members == (1, 2, 3)


@given(
    dest=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    data=st.data(),
)
def test_every_destination_gets_exactly_one_block(dest: list[int], data) -> None:
    keep = data.draw(st.lists(st.booleans(), min_size=len(dest), max_size=len(dest)))
    src = [n if kept else 1 for n, kept in zip(dest, keep, strict=True)]
    many = layout(dest)
    few = layout(src, first=100)
    reached = sorted(rank for g in broadcast_groups(few, many) for rank in g.members[1:])
    assert reached == list(many.ranks)
    for place, group in enumerate(broadcast_groups(few, many)):
        index = grid_index(src, place)
        for rank in group.members[1:]:
            other = grid_index(dest, rank)
            same = [a == b for a, b, n in zip(index, other, src, strict=True) if n > 1]
            assert all(same)


def test_a_mesh_is_a_layout_as_a_partition_is() -> None:
    mesh = Mesh(data=1, space=1)
    assert broadcast_groups(Partition([1]), mesh) == broadcast_groups(mesh, mesh)
    assert reduce_groups(mesh, Partition([1])) == [(0, (0,), (0,))]
