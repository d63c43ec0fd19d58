"""What the operators say to something that is no communicator."""

from __future__ import annotations

import pytest
import torch

from unisono import operators
from unisono.comm import world
from unisono.errors import PartitionError
from unisono.topology import halo

X = torch.ones(4)
REQUIRED = {
    "broadcast": lambda comm: operators.broadcast(X, comm=comm),
    "sum_reduce": lambda comm: operators.sum_reduce(X, comm=comm),
    "all_sum_reduce": lambda comm: operators.all_sum_reduce(X, comm=comm),
    "copy": lambda comm: operators.copy(X, comm=comm),
    "sum_to_replicated": lambda comm: operators.sum_to_replicated(X, comm=comm),
    "scatter": lambda comm: operators.scatter(X, comm=comm),
    "gather": lambda comm: operators.gather(X, comm=comm),
    "slice_replicated": lambda comm: operators.slice_replicated(X, comm=comm),
    "concat_replicated": lambda comm: operators.concat_replicated(X, comm=comm),
    "all_gather": lambda comm: operators.all_gather(X, comm=comm),
    "reduce_scatter": lambda comm: operators.reduce_scatter(X, comm=comm),
    "all_to_all": lambda comm: operators.all_to_all(X, [4], comm=comm),
    "permute": lambda comm: operators.permute(X, [0], comm=comm),
    "send": lambda comm: operators.send(X, 0, comm=comm),
    "recv": lambda comm: operators.recv(X, 0, comm=comm),
}


@pytest.mark.parametrize("name", REQUIRED)
@pytest.mark.parametrize("comm", [None, "world", 2])
def test_something_else_than_a_communicator_is_a_type_error_that_tells_what_to_pass(name, comm):
    with pytest.raises(TypeError) as caught:
        REQUIRED[name](comm)
    first, found, hint = str(caught.value).splitlines()
    assert first == f"{name}(..., comm={comm!r})"
    assert "communicator" in found.lower()
    assert hint.strip() == "HINT: comm=unisono.world()"


def test_where_the_world_is_the_default_only_none_stands_for_it():
    plan = halo.plan([(0, 4)], (0,), 3, padding=1)
    assert operators.halo_exchange(X, plan, comm=None).shape == (6,)
    with pytest.raises(TypeError, match=r"halo_exchange\(\.\.\., comm=0\)"):
        operators.halo_exchange(X, plan, comm=0)


@pytest.mark.ranks([1, 2], backend="gloo")
def test_what_a_rank_says_of_its_own_tensor_must_be_true():
    comm = world()
    sizes = [1] * comm.size
    with pytest.raises(PartitionError, match=r"sends itself 1 rows\n.*1 != 2"):
        operators.all_to_all(torch.ones(comm.size), sizes, [2] * comm.size, comm=comm)
    if comm.rank == 0 < comm.size - 1:
        for like in (((4,), torch.float32), ((3,), torch.float64)):
            with pytest.raises(PartitionError, match="rank 0 holds a tensor of shape"):
                operators.broadcast(torch.ones(3), 0, like=like, comm=comm)
    found = operators.broadcast(torch.ones(3), 0, like=((3,), torch.float32), comm=comm)
    assert found.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.ranks(2)
def test_a_process_group_is_named_with_the_way_to_a_communicator():
    group = world().process_group()
    with pytest.raises(TypeError, match=r"HINT: comm=Communicator\.of\(group\)"):
        operators.copy(X, comm=group)
