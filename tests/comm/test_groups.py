"""Communicators as values, and the cache behind them."""

from __future__ import annotations

import copy
import os
import pickle
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from unisono import Logs, run
from unisono.comm import Communicator, groups, mpi_style, world
from unisono.errors import MeshError, RankFailed, UnisonoError


def test_a_plain_process_is_a_world_of_one():
    comm = world()
    assert (comm.rank, comm.size, comm.ranks, comm.group) == (0, 1, (0,), None)
    assert comm.backend == "self"
    assert len(comm.hosts) == 1
    assert comm.sub([0]) == comm
    assert comm.split(None) is None
    assert not dist.is_initialized()


def test_a_communicator_is_a_value():
    comm = world()
    assert comm == world()
    assert hash(comm) == hash(world())
    assert copy.deepcopy({"comm": comm})["comm"] is comm
    assert pickle.loads(pickle.dumps(comm)) == comm
    assert comm.with_timeout(3.0).timeout_s == 3.0
    assert comm.with_timeout(3.0) == comm
    with pytest.raises(AttributeError, match="does not change"):
        comm.rank = 3


def test_deadline_comes_from_argument_then_environment(monkeypatch):
    monkeypatch.setenv("UNISONO_TIMEOUT_S", "12.5")
    assert world().timeout_s == 12.5
    assert world(timeout_s=3).timeout_s == 3
    for wrong in ("soon", "-1"):
        monkeypatch.setenv("UNISONO_TIMEOUT_S", wrong)
        with pytest.raises(UnisonoError, match=f"UNISONO_TIMEOUT_S='{wrong}'"):
            world()


def test_what_names_no_group_is_refused():
    with pytest.raises(UnisonoError, match=r"Communicator.of\(int\)"):
        Communicator.of(3)
    with pytest.raises(MeshError, match="only a mesh has axes"):
        Communicator.of(world(), axis="data")
    with pytest.raises(MeshError, match=r"out of range: \[1\]"):
        world().sub([0, 1])
    with pytest.raises(MeshError, match=r"more than once: \[0\]"):
        world().sub([0, 0])
    with pytest.raises(MeshError, match="empty"):
        world().sub([])


@pytest.mark.ranks(4)
def test_the_same_ranks_give_the_same_group():
    comm = world()
    pair = comm.sub([1, 3])
    again = comm.sub([1, 3])
    if comm.rank in (1, 3):
        assert pair.group is again.group
        assert pair.ranks == (1, 3)
        assert pair.all_reduce(torch.tensor([comm.rank])).item() == 4
    else:
        assert pair is None
    assert comm.sub(range(4)).group is dist.group.WORLD
    alone = comm.sub([comm.rank])
    assert alone.group is None
    assert alone.ranks == (comm.rank,)
    before = groups.count()
    for _ in range(50):
        comm.sub([1, 3])
        comm.split(comm.rank % 2)
    assert groups.count() <= before + 1


@pytest.mark.ranks(4)
def test_ranks_with_different_histories_can_make_a_group():
    """A name taken from the number of groups on a rank would differ here, and both would wait."""
    comm = world()
    comm.sub([0, 1])
    comm.sub([0, 2])
    last = comm.sub([0, 3])
    if comm.rank in (0, 3):
        assert last.all_reduce(torch.ones(1)).item() == 2


@pytest.mark.ranks(4)
def test_split_orders_by_key_then_rank():
    comm = world()
    half = comm.split(comm.rank % 2, key=-comm.rank)
    assert half.ranks == ((2, 0) if comm.rank % 2 == 0 else (3, 1))
    assert half.rank == half.ranks.index(comm.rank)
    assert half.all_gather(torch.tensor([comm.rank])).tolist() == list(half.ranks)
    assert half.broadcast(torch.tensor([comm.rank]), 0).item() == half.ranks[0]
    some = comm.split(0 if comm.rank else None)
    assert (some is None) == (comm.rank == 0)
    inner = half.sub([1])
    assert inner is None or inner.ranks == (half.ranks[1],)


@pytest.mark.ranks(4)
def test_groups_of_the_user_become_communicators():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "space"))
    rank = dist.get_rank()
    along = Communicator.of(mesh, axis="space")
    assert along.ranks == ((0, 1) if rank < 2 else (2, 3))
    assert Communicator.of(mesh, axis=0).ranks == (rank % 2, rank % 2 + 2)
    assert Communicator.of(mesh["data"]).ranks == (rank % 2, rank % 2 + 2)
    with pytest.raises(MeshError, match=r"axes data\(2\), space\(2\)"):
        Communicator.of(mesh)
    with pytest.raises(MeshError, match="axis='time'"):
        Communicator.of(mesh, axis="time")
    group = dist.new_group([0, 2])
    if rank in (0, 2):
        assert Communicator.of(group).all_reduce(torch.ones(1)).item() == 2
    else:
        with pytest.raises(MeshError, match=f"world rank {rank} is not a member"):
            Communicator.of(group)


@pytest.mark.ranks(2)
def test_a_closed_communicator_says_so_and_its_group_can_be_made_again():
    comm = world()
    for _ in range(3):
        pair = comm.sub([1, 0])
        copy_of_pair = pair.with_timeout(5.0)
        assert pair.all_reduce(torch.ones(1)).item() == 2
        pair.close()
        pair.close()
        for call in (pair.barrier, partial(pair.all_gather_object, 1), partial(pair.split, 0)):
            with pytest.raises(UnisonoError, match="closed"):
                call()
        assert copy_of_pair.all_reduce(torch.ones(1)).item() == 2
        before = groups.count()
        copy_of_pair.close()
        assert groups.count() == before - 1
    assert comm.all_reduce(torch.ones(1)).item() == 2


@pytest.mark.ranks(2, backend=["gloo", "shm"])
def test_a_child_forked_from_a_rank_is_refused_at_once_and_harms_nobody():
    comm = world()
    assert comm.all_reduce(torch.ones(1)).item() == 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn of a fork with threads
        child = os.fork()
    if child == 0:
        told = []
        for call in (comm.barrier, lambda: comm.all_gather_ints([1]), lambda: world().split(0)):
            try:
                call()
            except UnisonoError as error:
                told.append("forked" in str(error))
        os._exit(7 if told == [True] * 3 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert comm.all_reduce(torch.ones(1)).item() == 2


@pytest.mark.ranks(2)
def test_a_world_destroyed_by_the_user_empties_the_cache(tmp_path):
    comm = world()
    pair = comm.sub([1, 0])
    rank = comm.rank
    comm.barrier()
    dist.destroy_process_group()
    assert groups.count() == 0
    assert world().size == 1
    with pytest.raises(UnisonoError, match="no longer usable"):
        pair.all_reduce(torch.ones(1))
    store = dist.FileStore(str(tmp_path / "again"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    assert world().sub([1, 0]).all_reduce(torch.ones(1)).item() == 2


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("hygiene")
@pytest.mark.parametrize("use", ["world", "self", "message"])
def test_a_world_that_ended_keeps_no_connection_open(use):
    """The communicators everybody knows, and mailboxes, outlive worlds."""
    comm = mpi_style.MPI_WORLD  # by its module: an instance would travel as a new one
    if use == "world":
        comm.Barrier()
    elif use == "self":
        assert mpi_style.MPI_SELF.size == 1
    else:
        comm.isend("word", dest=1 - comm.rank)
        assert comm.recv(source=1 - comm.rank) == "word"


@pytest.mark.ranks(2)
def test_hosts_are_told_apart(monkeypatch):
    comm = world()
    assert len(set(comm.hosts)) == 1
    monkeypatch.setenv("UNISONO_HOST_ID", f"node{comm.rank}")
    pair = comm.sub([1, 0])
    assert pair.hosts == ("node1", "node0")


@pytest.mark.ranks(2)
def test_a_communicator_travels_by_pickle_inside_its_world():
    comm = world().sub([1, 0])
    back = pickle.loads(pickle.dumps(comm))
    assert back == comm
    assert back.group is comm.group


def test_a_communicator_of_another_world_is_refused(tmp_path):
    comm = world()
    with pytest.raises((MeshError, RankFailed), match="inside the function"):
        run(lambda: comm.size, ranks=2, logs=Logs(dir=tmp_path, console="none"))
