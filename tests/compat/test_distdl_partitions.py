"""DistDL's partitions: who is in them, who sends to whom, and the verbs they offer."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import sys
import types

import numpy as np
import pytest
import torch
import torch.distributed as dist

import unisono
from unisono.compat.distdl import nn as distdl
from unisono.compat.distdl.backends import mpi
from unisono.compat.distdl.backends.mpi import CartesianPartition, Partition, compare
from unisono.compat.distdl.backends.mpi.functional.all_sum_reduce import AllSumReduceFunction
from unisono.compat.distdl.backends.mpi.functional.broadcast import BroadcastFunction
from unisono.compat.distdl.backends.mpi.functional.repartition import RepartitionFunction
from unisono.compat.distdl.backends.mpi.functional.sum_reduce import SumReduceFunction
from unisono.compat.distdl.backends.mpi.tensor_decomposition import (
    compute_subtensor_shapes_unbalanced,
)
from unisono.compat.distdl.partitions import null_comm, null_rank
from unisono.compat.distdl.utilities.torch import TensorStructure, zero_volume_tensor
from unisono.errors import PartitionError


def world():
    """Return the partition of all ranks."""
    return Partition(unisono.world())


def members(P):
    """Return the ranks of the root in a partition; None where they are not known."""
    return None if P._group is None else list(P._group)


def test_a_partition_of_nothing_is_inactive():
    P = Partition()
    assert (P.active, P.rank, P.size, P.index) == (False, null_rank(), -1, None)
    assert (P.shape.tolist(), P.dim, members(P)) == ([-1], 1, None)
    assert P._comm is P._root is null_comm()
    assert Partition() != P
    grid = P.create_cartesian_topology_partition([2, 3])
    assert (grid.active, grid.shape.tolist(), grid.dim) == (False, [2, 3], 2)
    assert not P.create_partition_inclusive([0]).active
    assert P.broadcast_data(1) is None
    with pytest.raises(PartitionError, match=r"(?s)not known.*HINT: P_world"):
        P.create_partition_union(Partition())


def test_one_process_is_a_partition_too():
    P = world()
    assert (P.active, P.rank, P.size, P.index.tolist()) == (True, 0, 1, [0])
    grid = P.create_cartesian_topology_partition([1, 1], periods=[False, False], reorder=True)
    assert (grid.shape.tolist(), grid.index.tolist(), grid.dim) == ([1, 1], [0, 0], 2)
    assert grid.neighbor_ranks(0) == [(null_rank(), null_rank())] * 2
    with pytest.raises(TypeError, match="unknown options"):
        P.create_cartesian_topology_partition([1], colour=3)
    assert P.allreduce_data(np.array([3, 4])).tolist() == [3, 4]
    assert P.broadcast_data(5).tolist() == [5]
    assert P.allgather_data([1, 2]).tolist() == [[1, 2]]
    assert (P._comm.Get_rank(), P._comm.allgather("x")) == (0, ["x"])


@pytest.mark.ranks(4)
def test_partitions_are_known_on_all_ranks_and_active_on_some():
    P = world()
    me = P.rank
    assert (P.size, P.shape.tolist(), P.dim, P.index.tolist()) == (4, [4], 1, [me])
    odd = P.create_partition_inclusive(np.array([3, 1]))
    assert members(odd) == [3, 1]
    assert odd.active == (me in (1, 3))
    if me == 3:
        assert (odd.rank, odd.size, odd.shape.tolist()) == (0, 2, [2])
    if me == 0:
        assert (odd.rank, odd.size, odd.index) == (null_rank(), -1, None)
        assert odd._comm is null_comm()
    assert odd._root is P._root
    union = odd.create_partition_union(P.create_partition_inclusive([0, 1]))
    assert members(union) == [3, 1, 0]
    inner = odd.create_partition_inclusive([1])  # rank 1 of it is rank 1 of the world
    assert members(inner) == [1]
    grid = P.create_cartesian_topology_partition([2, 2])
    assert isinstance(grid, CartesianPartition)
    assert grid.index.tolist() == list(divmod(me, 2))
    assert grid.cartesian_index(2).tolist() == [1, 0]
    nobody = null_rank()
    assert grid.neighbor_ranks(1) == [(nobody, 3), (0, nobody)]
    rows = grid.create_cartesian_subtopology_partition([False, True])
    assert (members(rows), rows.shape.tolist()) == ([me // 2 * 2, me // 2 * 2 + 1], [2])
    column = odd.create_cartesian_topology_partition([2, 1])
    assert column.shape.tolist() == [2, 1]  # on inactive ranks too
    if not column.active:
        assert not column.create_cartesian_subtopology_partition([True, False]).active
        with pytest.raises(PartitionError, match="not in the partition"):
            column.cartesian_index(0)
    with pytest.raises(PartitionError, match="2 != 4"):
        P.create_cartesian_topology_partition([2, 1])
    first = P.create_allreduction_partition([0])
    assert members(first) == [0, 1, 2, 3]
    across = grid.create_allreduction_partition([0])
    assert (members(across), across.shape.tolist()) == ([me % 2, me % 2 + 2], [2, 1])


@pytest.mark.ranks(4)
def test_equality_deactivation_and_groups_of_torch():
    P = world()
    low = P.create_partition_inclusive([0, 1])
    again = P.create_partition_inclusive([0, 1])
    assert (low == again) == low.active
    assert low != P.create_partition_inclusive([1, 0])
    assert low != P
    assert low != "something else"
    assert compare.check_null_comm(low._comm) != low.active
    grid = low.create_cartesian_topology_partition([1, 2])
    grid.deactivate()
    grid.deactivate()
    assert (grid.active, grid.size, grid.rank, grid.index) == (False, -1, null_rank(), None)
    assert grid.shape.tolist() == [1, 2]
    again.deactivate()
    assert (again.active, again.shape.tolist(), low.active) == (False, [-1], P.rank < 2)
    assert low != again
    if low.active:
        assert low._comm.allgather(P.rank) == [0, 1]  # the group is still there
    group = dist.new_group([0, 1])
    if P.rank < 2:
        by_group = Partition(group)
        assert (by_group.rank, by_group.size) == (P.rank, 2)
        inside = Partition(group, root=dist.group.WORLD)
        assert inside == low
    given = Partition(None, group=[2, 3], root=unisono.world())
    assert (members(given), given.active) == ([2, 3], P.rank >= 2)
    assert compare.check_identical_group(given._group, (2, 3))
    assert not compare.check_identical_group(None, None)
    assert compare.check_null_rank(null_rank())
    assert compare.check_identical_comm(P._comm, world()._comm)


@pytest.mark.ranks(4)
def test_teams_of_broadcasts_and_reductions():
    P = world()
    me = P.rank
    row = P.create_partition_inclusive([0, 1]).create_cartesian_topology_partition([1, 2])
    grid = P.create_cartesian_topology_partition([2, 2])
    send, recv = row.create_broadcast_partition_to(grid)
    assert members(send) == ([[0, 2], [1, 3], None, None][me])
    assert members(recv) == [me % 2, me % 2 + 2]
    assert (send is recv) == (me < 2)
    assert recv.rank == me // 2
    send, recv = grid.create_reduction_partition_to(row)
    assert members(send) == [me % 2, me % 2 + 2]
    assert members(recv) == ([[0, 2], [1, 3], None, None][me])
    # A transposed source: the pairing is by the reversed index.
    column = P.create_partition_inclusive([2, 3]).create_cartesian_topology_partition([2, 1])
    send, recv = column.create_broadcast_partition_to(grid, transpose_src=True)
    assert members(send) == ([None, None, [2, 0], [3, 1]][me])
    assert members(recv) == [[2, 0], [3, 1]][me % 2]
    block = P.create_partition_inclusive([1]).create_cartesian_topology_partition([1, 1])
    send, recv = block.create_broadcast_partition_to(row)
    assert members(send) == ([1, 0] if me == 1 else None)
    assert members(recv) == ([1, 0] if me < 2 else None)
    three = P.create_partition_inclusive([0, 1, 2]).create_cartesian_topology_partition([3])
    with pytest.raises(PartitionError, match="3 against 2"):
        three.create_broadcast_partition_to(grid)


@pytest.mark.ranks(3)
def test_data_of_members_reaches_members():
    P = world()
    me = P.rank
    assert P.broadcast_data(np.arange(4) if me == 2 else None, root=2).tolist() == [0, 1, 2, 3]
    tail = P.create_partition_inclusive([2, 1])
    assert P.broadcast_data([me, 7.5], P_data=tail).tolist() == [2, 7.5]
    assert P.broadcast_data([me], root=1, P_data=tail).tolist() == [1]
    with pytest.raises(ValueError, match=r"\[-1, 1, 0\]"):
        P.broadcast_data([me], root=2, P_data=tail)
    part = tail.broadcast_data(np.full((2, 2), me))
    assert (part is None) == (me == 0)
    if me > 0:
        assert part.tolist() == [[2, 2], [2, 2]]
    assert P.allgather_data(np.array([me, 10 * me])).tolist() == [[0, 0], [1, 10], [2, 20]]
    assert P.allreduce_data(np.array([me + 1, 2])).tolist() == [6, 6]
    assert P.allreduce_data(np.array([me + 1.0]), op="prod").tolist() == [6.0]
    assert P.allreduce_data(np.array(me), op="max") == 2
    assert P.allreduce_data(np.array([me]), op="min").dtype == np.int64
    with pytest.raises(ValueError, match="'prod', 'sum'"):
        P.allreduce_data(np.array([me]), op="mean")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        P.print_sequential(f"rank {me}")
        tail.print_sequential(me)
    lines = printed.getvalue().splitlines()
    assert lines == [["rank 0", "rank 1", "rank 2"], [], ["2", "1"]][me]


@pytest.mark.ranks(2)
def test_the_communicator_of_a_partition_has_the_verbs_of_mpi():
    P = world()
    comm = P._comm
    assert (comm.rank, comm.size, comm.Get_rank(), comm.Get_size()) == (P.rank, 2, P.rank, 2)
    comm.Barrier()
    assert comm.gather(P.rank, root=1) == (None if P.rank == 0 else [0, 1])
    assert comm.allgather(P.rank) == [0, 1]
    assert comm.bcast("x" if P.rank == 0 else None) == "x"
    total = np.zeros(2)
    comm.Allreduce(np.array([1.0, P.rank]), total, mpi.operation_map["sum"])
    assert total.tolist() == [2, 1]
    comm.Reduce(np.array([P.rank + 1.0, 0]), total, mpi.operation_map["max"], root=0)
    assert total[0] == 2 or P.rank == 1
    part = comm.Split(P.rank, 0)
    assert part.size == 1
    single = P.create_partition_inclusive([1])
    if single.active:
        assert single._comm.allgather("me") == ["me"]


@pytest.mark.ranks(2)
def test_the_world_of_mpi_means_all_ranks_when_mpiexec_has_not_started_them():
    class Comm:
        def Get_size(self):
            return 1

    fake = types.ModuleType("mpi4py.MPI")
    fake.Comm, fake.Group, fake.PROC_NULL = Comm, Comm, -7
    fake.COMM_WORLD, fake.COMM_NULL = Comm(), Comm()
    sys.modules["mpi4py.MPI"] = fake
    try:
        P = Partition(fake.COMM_WORLD)
        assert (P.size, P.rank, P._comm.allgather("x")) == (2, unisono.world().rank, ["x", "x"])
        nobody = Partition(fake.COMM_NULL)
        assert (nobody.active, nobody.rank, nobody._comm) == (False, -7, fake.COMM_NULL)
        assert P.create_cartesian_topology_partition([2]).neighbor_ranks(0) == [(-7, 1)]
    finally:
        del sys.modules["mpi4py.MPI"]


@pytest.mark.ranks(4)
def test_structures_of_split_tensors_become_those_of_the_whole():
    P = world()
    grid = P.create_partition_inclusive([1, 2, 3]).create_cartesian_topology_partition([3, 1])
    rows = [2, 5, 1]
    x = zero_volume_tensor()
    if grid.active:
        x = torch.ones(rows[grid.rank], 4, dtype=torch.float64, requires_grad=True)
    found = mpi.assemble_global_tensor_structure(x, grid)
    if grid.active:
        assert (found.shape, found.dtype, found.requires_grad) == ((8, 4), torch.float64, True)
    else:
        assert found == TensorStructure()
    everywhere = mpi.assemble_global_tensor_structure(TensorStructure(x), grid, P)
    assert (everywhere.shape, everywhere.dtype) == ((8, 4), torch.float64)
    shapes = compute_subtensor_shapes_unbalanced(x, grid)
    assert (shapes is None) == (not grid.active)
    shapes = compute_subtensor_shapes_unbalanced(x, grid, P)
    assert shapes.shape == (3, 1, 2)
    assert shapes[:, 0].tolist() == [[2, 4], [5, 4], [1, 4]]
    square = P.create_cartesian_topology_partition([2, 2])
    with pytest.raises(ValueError, match="1 tensor dims, 2 partition dims"):
        compute_subtensor_shapes_unbalanced(torch.ones(3), square)


def probed(y):
    """Return a number that is different for every element."""
    return (y * torch.linspace(1, 2, y.numel(), dtype=y.dtype).reshape(y.shape)).sum()


@pytest.mark.ranks(4)
def test_functions_move_blocks_and_their_gradients():
    P = world()
    me = P.rank
    row = P.create_partition_inclusive([2, 1]).create_cartesian_topology_partition([1, 2])
    grid = P.create_cartesian_topology_partition([2, 2])
    send, recv = row.create_broadcast_partition_to(grid)
    x = zero_volume_tensor(3)
    if row.active:
        x = torch.full((3, 2), 10.0 + me, requires_grad=True)
    y = BroadcastFunction.apply(x, send, recv, True)
    assert y.tolist() == torch.full((3, 2), 12.0 if me % 2 == 0 else 11.0).tolist()
    known = mpi.broadcast_tensor_structure(TensorStructure(x), send, recv)
    assert (known.shape, known.requires_grad) == ((3, 2), True)
    probed(y).backward()
    if row.active:
        assert torch.equal(x.grad, 2 * torch.linspace(1, 2, 6).reshape(3, 2))

    send, recv = grid.create_reduction_partition_to(row)
    z = torch.full((2,), 1.0 + me, requires_grad=True)
    total = SumReduceFunction.apply(z, send, recv, False)
    expected = {2: [4.0, 4.0], 1: [6.0, 6.0]}
    assert total.tolist() == expected.get(me, [])
    probed(total).backward()
    assert z.grad.tolist() == [1, 2]

    team = grid.create_allreduction_partition([1])
    z = torch.full((2,), 1.0 + me, requires_grad=True)
    total = AllSumReduceFunction.apply(z, team, TensorStructure(z), TensorStructure(z))
    assert total.tolist() == [3.0 if me < 2 else 7.0] * 2
    probed(total).backward()
    assert z.grad.tolist() == [2, 4]
    assert not AllSumReduceFunction.apply(zero_volume_tensor(), Partition()).numel()


@pytest.mark.ranks(2)
def test_the_repartition_function_follows_lists_of_overlaps():
    from unisono.compat.distdl.backends.mpi.repartition import allocate_repartition_buffers
    from unisono.compat.distdl.nn import Repartition

    P = world()
    first = P.create_partition_inclusive([0]).create_cartesian_topology_partition([1, 1])
    both = P.create_cartesian_topology_partition([1, 2])
    whole = torch.arange(10.0).reshape(2, 5)
    x = whole.clone() if first.active else zero_volume_tensor(2)
    x.requires_grad_()
    layer = Repartition(first, both)
    assert layer.P_x_to_y_overlaps == layer.P_y_to_x_overlaps == []
    own = layer(x)
    out, into = layer.P_x_to_y_overlaps, layer.P_y_to_x_overlaps
    if P.rank == 0:
        assert [(slices, partner) for slices, _, partner in out] == [
            ((slice(0, 2), slice(0, 3)), "self"),
            ((slice(0, 2), slice(3, 5)), 1),
        ]
        assert out[1][1].tolist() == [2, 2]
    else:
        assert out == []
    assert [partner for _, _, partner in into] == ["self" if P.rank == 0 else 0]
    buffers = allocate_repartition_buffers(layer.buffer_manager, out, into, torch.float32)
    assert [b is not None for b in buffers[0]] == ([False, True] if P.rank == 0 else [])
    structure = mpi.assemble_global_tensor_structure(x, first, P)
    moved = RepartitionFunction.apply(
        x, P, structure, TensorStructure(x), TensorStructure(own), first, out, buffers[0],
        both, into, buffers[1], True,
    )  # fmt: skip
    assert torch.equal(moved, own)
    assert torch.equal(moved, whole[:, :3] if P.rank == 0 else whole[:, 3:])
    (moved * (P.rank + 1)).sum().backward()
    if first.active:
        assert x.grad.tolist() == [[1, 1, 1, 2, 2]] * 2
    # The way back: the second rank ends with nothing, and says so.
    back = Repartition(both, first)
    assert torch.equal(back(own), whole) if first.active else back(own).shape == (2, 0)
    assert back.P_y_to_x_overlaps == [] or first.active
    other = Repartition(P.create_cartesian_topology_partition([2, 1]), both)
    other(whole[P.rank : P.rank + 1])
    assert all(slices is not None for slices, _, _ in other.P_x_to_y_overlaps)
    same = Repartition(both, both)
    same(own)
    assert [partner for _, _, partner in same.P_x_to_y_overlaps] == (
        ["self", None] if P.rank == 0 else [None, "self"]
    )


@pytest.mark.ranks(2, backend=["gloo", "shm"])
def test_partitions_are_copied_and_pickled_with_the_modules_that_hold_them():
    P = world()
    grid = P.create_cartesian_topology_partition([1, 2])
    one = P.create_partition_inclusive([1])
    for made in (P, grid, one, Partition(), one.create_cartesian_topology_partition([1])):
        for copied in (copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
            assert type(copied) is type(made)
            assert (copied == made) is made.active
            assert (copied.active, copied.rank, copied.size) == (made.active, made.rank, made.size)
            assert copied.shape.tolist() == made.shape.tolist()
            assert members(copied) == members(made)
    again = pickle.loads(pickle.dumps(grid))
    assert again.allgather_data(again.rank).ravel().tolist() == [0, 1]
    assert again._comm.allgather(again.rank) == [0, 1]

    class Sum(distdl.Module):
        def __init__(self):
            super().__init__()
            self.P = grid

        def forward(self, input):
            return input * float(self.P.allreduce_data([1.0])[0])

    copied = copy.deepcopy(Sum())
    copied.P.deactivate()
    assert grid.active  # a copy leaves alone
    layer = copy.deepcopy(Sum())
    assert grid == layer.P
    assert layer(torch.ones(1)).item() == 2.0
