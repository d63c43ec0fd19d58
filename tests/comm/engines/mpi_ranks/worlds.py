"""Communicators from mpi4py's, groups made of them, and worlds that start and end."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from mpi4py import MPI
from verbs import raised

from unisono.comm import (
    Communicator,
    Environment,
    close_world,
    detect,
    post_failure,
    start_world,
    stop_world,
    world,
)
from unisono.comm.engines import mpi
from unisono.comm.engines.mpi import groups as mpi_groups
from unisono.errors import MeshError, RankFailed, UnisonoError

ALL = MPI.COMM_WORLD


def begin():
    """Start a world of all ranks over MPI."""
    return start_world(detect(), backend="mpi", timeout_s=20)


def check_the_world_of_mpi_is_our_world():
    c = Communicator.of(ALL)
    assert c.group is dist.group.WORLD
    assert c == world()
    assert (c.rank, c.size, c.backend) == (ALL.rank, ALL.size, "mpi4py")
    engine = c.group.unisono_engine
    assert isinstance(engine, mpi.MpiEngine)
    assert dist.get_backend() == "mpi4py"
    same = MPI.Comm.Compare(engine.channel.comm, ALL)
    assert same == MPI.CONGRUENT  # the same ranks, another context
    assert engine.channel.comm.Get_errhandler() == MPI.ERRORS_RETURN


def check_parts_of_mpi_become_cached_groups_of_their_ranks():
    odd = ALL.Split(ALL.rank % 2)
    c = Communicator.of(odd)
    assert c.ranks == tuple(range(ALL.rank % 2, ALL.size, 2))
    assert float(c.all_reduce(torch.ones(1))) == c.size
    again = odd.Dup()
    assert Communicator.of(again).group is c.group
    backwards = ALL.Split(0, -ALL.rank)
    r = Communicator.of(backwards)
    assert r.ranks == tuple(reversed(range(ALL.size)))
    assert r.rank == backwards.rank == ALL.size - 1 - ALL.rank
    assert r.all_gather(torch.tensor([ALL.rank])).tolist() == list(r.ranks)
    for comm in (odd, again, backwards):
        comm.Free()
    assert float(r.all_reduce(torch.ones(1))) == ALL.size  # ours do not depend on theirs
    assert world().sub(list(r.ranks)).group is r.group


def check_one_rank_alone_and_no_rank_at_all():
    c = Communicator.of(MPI.COMM_SELF)
    assert (c.size, c.ranks, c.backend, c.group) == (1, (ALL.rank,), "self", None)
    assert "in no group" in str(raised(MeshError, lambda: Communicator.of(MPI.COMM_NULL)))
    half = ALL.Split(ALL.rank % 2)
    bridge = half.Create_intercomm(0, ALL, 1 - ALL.rank % 2)
    assert "Merge" in str(raised(MeshError, lambda: Communicator.of(bridge)))
    bridge.Free()
    half.Free()


def check_groups_are_made_by_their_members_alone():
    if ALL.rank in (0, 1):
        c = world().sub([1, 0])
        assert c.all_gather(torch.tensor([ALL.rank])).tolist() == [1, 0]
        c.close()
    ranks = [0, ALL.size - 1]
    group = dist.new_group(ranks, backend="mpi4py")
    if ALL.rank in ranks:
        x = torch.ones(1)
        dist.all_reduce(x, group=group)
        assert x.item() == len(ranks)
        dist.destroy_process_group(group)
    a, b = dist.new_group(backend="mpi4py"), dist.new_group(backend="mpi4py")
    first, second = (a, b) if ALL.rank == 0 else (b, a)
    tensors = {a: torch.ones(50_000), b: torch.ones(50_000)}
    works = [dist.all_reduce(tensors[g], group=g, async_op=True) for g in (first, second)]
    for work in works:
        work.wait()
    for group, x in tensors.items():
        assert x.unique().tolist() == [float(ALL.size)]
        dist.destroy_process_group(group)


def check_groups_are_made_while_the_world_is_busy():
    for turn in range(4):
        xs = [torch.ones(400_000) for _ in range(3)]
        works = [dist.all_reduce(x, async_op=True) for x in xs]
        if turn % ALL.size == ALL.rank:
            time.sleep(0.01)  # here the calls above begin first, elsewhere perhaps not
        group = dist.new_group(backend="mpi4py")
        part = world().sub([1, 0])
        for work in works:
            work.wait()
        assert all(float(x[-1]) == ALL.size for x in xs)
        dist.destroy_process_group(group)
        if part is not None:
            part.close()


def check_groups_that_come_and_go_leave_nothing():
    def made_and_gone():
        group = dist.new_group(backend="mpi4py")
        dist.all_reduce(torch.ones(1), group=group, async_op=True).wait()
        dist.destroy_process_group(group)

    made_and_gone()
    assert within(20, mpi_groups.sweep)
    before = belongings()
    for _ in range(12):
        made_and_gone()
    assert within(20, lambda: no_more_than(before)), (before, belongings())


def check_a_failure_that_a_rank_posts_reaches_the_others():
    dist.barrier()
    if ALL.rank == 1:
        post_failure(ValueError("posted on purpose"))
    else:
        error = raised(RankFailed, lambda: dist.all_reduce(torch.ones(1)))
        assert error.rank == 1
        assert "posted on purpose" in str(error)
    ALL.Barrier()
    close_world()


def check_worlds_that_start_and_end_leave_nothing():
    def lived():
        assert float(begin().all_reduce(torch.ones(1))) == ALL.size
        dist.all_reduce(torch.ones(1), async_op=True).wait()
        close_world()

    lived()
    assert within(20, mpi_groups.sweep)
    before = belongings()
    for _ in range(2):
        lived()
    assert within(20, lambda: no_more_than(before)), (before, belongings())


def check_an_mpi_group_in_a_world_of_gloo():
    store = mpi.store_of(ALL)
    dist.init_process_group("gloo", store=store, rank=ALL.size - 1 - ALL.rank, world_size=ALL.size)
    c = Communicator.of(ALL)
    assert c.backend == "mpi4py"
    assert c.ranks == tuple(reversed(range(ALL.size)))
    assert c.all_gather(torch.tensor([ALL.rank])).tolist() == list(range(ALL.size))
    assert Communicator.of(ALL).group is c.group
    assert world().backend == "gloo"
    close_world()


def check_a_world_that_mpiexec_started_needs_no_address():
    here = detect()
    assert (here.rank, here.size) == (ALL.rank, ALL.size)
    for backend, name in (("mpi", "mpi4py"), ("gloo", "gloo")):
        store = mpi.store_for(here, timeout_s=20)
        c = start_world(here, backend=backend, store=store, timeout_s=20)
        assert (c.backend, c.ranks) == (name, tuple(range(ALL.size)))
        assert float(c.all_reduce(torch.ones(1))) == ALL.size
        stop_world()
    assert mpi.store_for(Environment(kind="mpich", rank=0, size=99), timeout_s=20) is None


def check_the_thread_of_a_group_ends_with_it():
    begin().start.all_reduce(torch.ones(1)).wait()
    assert any(thread.name.startswith("unisono-mpi") for thread in threading.enumerate())
    group = dist.group.WORLD
    close_world()
    assert not any(thread.name.startswith("unisono-") for thread in threading.enumerate())
    error = raised(UnisonoError, lambda: group.unisono_engine.barrier(async_op=False, timeout_s=1))
    assert "closed by destroy_process_group" in str(error)


def belongings():
    """What this process holds that somebody must give back."""
    gc.collect()
    return {
        "threads": threading.active_count(),
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "communicators": not mpi_groups.sweep(),
    }


def no_more_than(before):
    return all(now <= before[what] for what, now in belongings().items())


def within(seconds, holds):
    give_up = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > give_up:
            return False
        time.sleep(0.02)
    return True
