"""Messages of torch and of MPI's style, trace and check mode over MPI."""

from __future__ import annotations

import time

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI

from unisono.comm import check, trace
from unisono.comm.mpi_style import MPI_WORLD, MPICommunication, Status
from unisono.errors import CollectiveMismatch, RankTimeout, UnisonoError

BIG = 300_000


def raised(kind, call):
    """Return the error of `kind` that `call` raises."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__} was raised")


def check_tags_above_the_limit_of_mpi_are_folded_and_never_mixed_up():
    group = dist.new_group(backend="mpi4py")
    group.unisono_engine.channel.tags = 1000  # as an MPI with few tags
    rank, size = dist.get_rank(), dist.get_world_size()
    to, source, x = (rank + 1) % size, (rank - 1) % size, torch.empty(3)
    works = [dist.isend(torch.full((3,), float(i)), to, group, 2**30 + i) for i in (0, 1)]
    for i in (1, 0):
        dist.recv(x, source, group, 2**30 + i)
        assert x.unique().tolist() == [float(i)]
    for work in works:
        work.wait()
    dist.barrier()
    if rank == 0:
        dist.isend(x, to, group, 5)
    if rank == 1:
        error = raised(CollectiveMismatch, lambda: dist.recv(x, source, group, 1005))
        assert "5 % 1000 = 1005 % 1000" in str(error)
    dist.barrier()
    dist.destroy_process_group(group)


def check_a_large_message_moves_on_without_a_waiter():
    rank, x = dist.get_rank(), torch.arange(float(BIG))
    if rank == 0:
        work = dist.isend(x, 1)
        deadline = time.monotonic() + 10
        while not work.is_completed() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert work.is_completed()
    elif rank == 1:
        dist.recv(x.zero_(), 0)
        assert x[-1] == BIG - 1
    dist.barrier()


def check_trace_and_check_mode_see_the_calls_of_torch():
    with trace() as t:
        dist.barrier()
        if dist.get_rank() == 1:
            time.sleep(0.5)
        dist.all_reduce(torch.ones(100))
        dist.all_reduce(torch.ones(100), async_op=True).wait()
    blocking, later = [e for e in t.events if e.op == "all_reduce"]
    assert (blocking.sent, blocking.dtype, later.is_async) == (400, "float32", True)
    assert blocking.algorithm in ("native", "all_to_all")
    assert "verbs.py" in blocking.site
    assert dist.get_rank() != 0 or blocking.wait_ns > 1e7
    with check():
        dist.barrier()
        error = raised(CollectiveMismatch, lambda: dist.all_reduce(torch.ones(3 + dist.get_rank())))
    assert "different shapes" in str(error)
    assert "verbs.py" in str(error)
    y = torch.ones(2)
    dist.all_reduce(y)
    assert y.tolist() == [float(dist.get_world_size())] * 2


def check_a_rank_that_waits_sleeps():
    dist.barrier()
    if dist.get_rank() == 0:
        time.sleep(1.0)
    before = time.process_time()
    dist.barrier()
    if dist.get_rank():
        assert time.process_time() - before < 0.3


def check_the_verbs_of_mpi_take_communicators_and_constants_of_mpi4py():
    comm, total = MPICommunication(MPI.COMM_WORLD), torch.ones(1)
    comm.Allreduce(MPI.IN_PLACE, total, op=MPI.SUM)
    assert total.item() == comm.size == MPI_WORLD.size == MPI.COMM_WORLD.size
    assert MPI_WORLD.handle.backend == "mpi4py"


def check_messages_of_mpis_style_come_from_any_source_with_any_tag_and_length():
    comm = MPI_WORLD
    if comm.rank == 0:
        tags = {}
        for _ in range(2 * (comm.size - 1)):
            status, room = Status(), np.zeros(BIG, dtype=np.int64)
            comm.Recv(room, MPI.ANY_SOURCE, MPI.ANY_TAG, status)
            assert (room[: status.Get_count()] == status.Get_source()).all()
            assert (room[status.Get_count() :] == 0).all()
            tags.setdefault(status.Get_source(), []).append(status.Get_tag())
        assert tags == {r: [5, 6] for r in range(1, comm.size)}
    else:
        comm.Send(np.full(comm.rank, comm.rank), 0, tag=5)
        comm.Send(np.full(BIG - comm.rank, comm.rank), 0, tag=6)
    comm.Barrier()
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    comm.Send(torch.arange(1.0, 6.0), right, tag=40)
    half = torch.zeros(4, 2).t()
    comm.Recv(half, left, 40)
    assert half.tolist() == [[1, 2, 3, 4], [5, 0, 0, 0]]
    comm.send("to itself", comm.rank, tag=3)
    assert comm.recv(source=comm.rank) == "to itself"
    twin = comm.Dup()
    comm.send("first", right)
    twin.send("second", right)
    assert [twin.recv(), comm.recv()] == ["second", "first"]
    twin.Free()


def check_receives_are_served_in_the_order_of_their_calls():
    comm = MPI_WORLD
    if comm.rank == 0:
        outs = [torch.zeros(1) for _ in range(3)]
        requests = [comm.Irecv(outs[0], 1), comm.Irecv(outs[1]), comm.Irecv(outs[2], 1, 2)]
        comm.Barrier()
        for request in reversed(requests):
            request.Wait()
        assert [out.item() for out in outs] == [1.0, 2.0, 3.0]
    else:
        comm.Barrier()
        if comm.rank == 1:
            for number in (1, 2, 3):
                comm.Send(torch.tensor([float(number)]), 0, tag=2)


def check_a_synchronous_send_waits_for_its_receive_and_a_plain_one_does_not():
    comm = MPI_WORLD
    for n in (2, BIG):
        if comm.rank == 0:
            request = comm.Issend(torch.ones(n), 1, tag=1)
            comm.Send(torch.zeros(n), 1, tag=2)
            assert not request.Test()
            comm.Barrier()
            request.Wait()
        else:
            out = torch.ones(n)
            if comm.rank == 1:
                comm.Recv(out, 0, tag=2)  # the one sent first stays
                assert out.sum() == 0
                time.sleep(0.05)
            comm.Barrier()
            if comm.rank == 1:
                comm.Recv(out, 0, tag=1)
                assert out.sum() == n
        comm.Barrier()


def check_a_message_that_is_too_long_is_refused_and_the_next_one_arrives():
    comm = MPI_WORLD
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for n in (5, BIG):
        for _ in range(2):
            comm.Send(torch.ones(n), right)
        error = raised(UnisonoError, lambda n=n: comm.Recv(torch.zeros(n - 1), left))
        assert "a message over MPI" in str(error)
        out = torch.zeros(n)
        comm.Recv(out, left)
        assert out.sum() == n


def check_a_receive_of_mpis_style_that_is_given_up_takes_no_later_message():
    comm = MPICommunication(MPI.COMM_WORLD)
    if comm.rank == 0:
        comm._resolved = comm._comm.with_timeout(0.3)
        request = comm.Irecv(torch.zeros(1), 1)
        for _ in range(2):  # a second wait does not say that it came
            assert "rank 1" in str(raised(RankTimeout, request.Wait))
    MPI_WORLD.Barrier()
    if comm.rank == 1:
        MPI_WORLD.Send(torch.ones(1), 0)
    if comm.rank == 0:
        out = torch.zeros(1)
        MPI_WORLD.Recv(out)
        assert out.item() == 1
