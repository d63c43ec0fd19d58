"""Partitions as values in a plain process, and as communicators on several ranks."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist

from unisono.comm import Communicator, world
from unisono.errors import PartitionError
from unisono.topology import Mesh, Partition, halo


def test_shape_arithmetic_needs_nothing_initialised() -> None:
    p = Partition([2, 3])
    assert (p.shape, p.dim, p.size, p.ranks) == ((2, 3), 2, 6, (0, 1, 2, 3, 4, 5))
    assert [p.index_of(rank) for rank in range(6)] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
        (1, 1),
        (1, 2),
    ]
    assert [p.rank_at(p.index_of(rank)) for rank in range(6)] == list(range(6))
    assert p.local_shape([5, 7], rank=0) == (3, 3)
    assert p.local_slices([5, 7], rank=5) == (slice(3, 5), slice(5, 7))
    assert p.cuts([5, 7]) == ((0, 3, 5), (0, 3, 5, 7))


def test_neighbors_are_none_at_an_edge() -> None:
    p = Partition([2, 3])
    assert p.neighbors(0) == [(None, 3), (None, 1)]
    assert p.neighbors(4) == [(1, None), (3, 5)]


def test_sub_keeps_the_coordinates_outside_its_axes() -> None:
    p = Partition([2, 2, 2], ranks=range(10, 18))
    assert p.sub(1, rank=5) == Partition([1, 2, 1], ranks=(15, 17))
    assert p.sub([0, 2], rank=2) == Partition([2, 1, 2], ranks=(12, 13, 16, 17))
    assert p.sub([], rank=3) == Partition([1, 1, 1], ranks=(13,))


def test_union_puts_own_ranks_first() -> None:
    assert Partition([2], ranks=(4, 1)).union(Partition([3], ranks=(1, 0, 4))).ranks == (4, 1, 0)
    assert Partition([2, 1]).union(Partition([2, 2])).shape == (4,)


def test_equal_partitions_are_equal_and_hash_alike() -> None:
    assert Partition([2, 2]) == Partition((2, 2), ranks=range(4))
    assert hash(Partition([2, 2])) == hash(Partition((2, 2)))
    assert Partition([2, 2]) != Partition([4])
    assert Partition([2], ranks=(0, 1)) != Partition([2], ranks=(1, 0))
    assert Partition([1]) == Partition([1], comm=world())
    assert Partition([1]) != "Partition([1])"


def test_copies_and_pickles_are_the_same_value() -> None:
    p = Partition([2, 2], ranks=(3, 2, 1, 0))
    assert copy.deepcopy(p) is p
    assert copy.copy(p) is p
    assert pickle.loads(pickle.dumps(p)) == p
    assert pickle.loads(pickle.dumps(Partition([1], comm=world()))) == Partition([1])


def test_a_partition_cannot_be_changed() -> None:
    p = Partition([2])
    with pytest.raises(AttributeError, match="frozen"):
        p.shape = (3,)
    with pytest.raises(AttributeError, match="frozen"):
        del p.shape


@pytest.mark.ranks(4)
def test_the_communicator_of_a_partition_follows_its_order() -> None:
    p = Partition([3], ranks=(2, 0, 3))
    if not p.active:
        assert (p.rank, p.index) == (None, None)
        with pytest.raises(PartitionError, match="not a member"):
            _ = p.comm
        with pytest.raises(PartitionError, match=r"partition\.active"):
            p.local_shape([6])
        return
    assert p.comm.rank == p.rank
    gathered = p.comm.all_gather(torch.tensor([dist.get_rank()]))
    assert gathered.tolist() == [2, 0, 3]
    assert p.group is p.comm.group
    assert Partition([3], ranks=(2, 0, 3)).group is p.group, "one group for one rank tuple"


@pytest.mark.ranks(4)
def test_sub_partitions_sum_along_one_axis() -> None:
    p = Partition([2, 2])
    rows = p.sub(1)
    total = rows.comm.all_reduce(torch.tensor([float(dist.get_rank())]))
    assert total.item() == (1.0 if dist.get_rank() < 2 else 5.0)
    assert Communicator.of(p, axis=1) == rows.comm


@pytest.mark.ranks(3)
def test_a_partition_larger_than_the_world_is_refused_on_every_rank() -> None:
    with pytest.raises(PartitionError, match=r"2 \* 2 = 4 > 3"):
        Partition([2, 2])
    with pytest.raises(PartitionError, match="rank 3 >= 3"):
        Partition([2], ranks=(0, 3))


@pytest.mark.ranks(4)
def test_partitions_of_different_roots_are_not_mixed() -> None:
    half = world().sub((0, 1)) if dist.get_rank() < 2 else world().sub((2, 3))
    with pytest.raises(PartitionError, match="root communicators 'world'") as caught:
        Partition([2]).union(Partition([2], comm=half))
    assert "HINT" in str(caught.value)
    assert Partition([2]) != Partition([2], comm=half)


@pytest.mark.ranks(4)
def test_a_process_group_serves_as_root() -> None:
    group = dist.new_group([1, 2, 3])
    if dist.get_rank() == 0:
        return
    p = Partition([3], comm=group)
    assert p.rank == dist.get_rank() - 1
    assert p.group is group
    assert Partition([2], ranks=(0, 2), comm=group).active == (dist.get_rank() != 2)


@pytest.mark.ranks(4)
def test_a_mesh_axis_splits_a_tensor_dim() -> None:
    mesh = Mesh(data=2, h=2)
    p = Partition.from_mesh(mesh, {"h": 2}, ndim=4)
    assert p.shape == (1, 1, 2, 1)
    first = dist.get_rank() // 2 * 2
    assert p.ranks == (first, first + 1)
    assert p.index == (0, 0, mesh.coordinate("h"), 0)
    assert p.comm == mesh.comm("h")
    turned = Partition.from_mesh(mesh, {"h": 0, "data": 1})
    assert turned.shape == (2, 2)
    assert turned.ranks == (0, 2, 1, 3)
    both = Partition.from_mesh(mesh, {"data": 0, "h": 0})
    assert (both.shape, both.ranks) == ((4,), (0, 1, 2, 3))


@pytest.mark.ranks(2)
def test_a_plan_follows_from_partition_and_shape_alone() -> None:
    p = Partition([1, 2])
    assert p.index is not None
    plan = halo.plan(p.cuts([3, 9]), p.index, (3,), padding=1)
    assert plan.rank == p.rank
    assert plan.block_shape == p.local_shape([3, 9])
