"""Messages of torch, trace and check mode over MPI; the verbs are those of `test_verbs.py`."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from mpi4py import MPI

from unisono.comm import check, trace
from unisono.comm.mpi_style import MPI_WORLD, MPICommunication
from unisono.errors import CollectiveMismatch, UnisonoError

BIG = 300_000


def raised(kind, call):
    """Return the error of `kind` that `call` raises."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__} was raised")


def check_tags_are_matched_out_of_order_and_equal_tags_in_order():
    rank, size = dist.get_rank(), dist.get_world_size()
    to, source = (rank + 1) % size, (rank - 1) % size
    works = [dist.isend(torch.full((10 + tag,), float(tag)), to, tag=tag) for tag in (1, 2, 3)]
    works += [dist.isend(torch.full((4,), float(i)), to, tag=9) for i in range(6)]
    for tag in (3, 1, 2):
        x = torch.empty(10 + tag)
        dist.recv(x, source, tag=tag)
        assert x.unique().tolist() == [float(tag)]
    for i in range(6):
        x = torch.empty(2, 2).t()
        dist.recv(x, source, tag=9)
        assert x.unique().tolist() == [float(i)]
    for work in works:
        work.wait()
        assert work.is_completed()
    error = raised(UnisonoError, lambda: dist.send(torch.ones(1), to, tag=2**62))
    assert "this MPI has tags 0 to" in str(error)


def check_receive_from_anybody_tells_who_sent():
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank:
        dist.send(torch.full((5,), float(rank)), 0, tag=4)
        return
    seen = []
    for _ in range(size - 1):
        x = torch.empty(5)
        source = dist.recv(x, tag=4)
        assert x.tolist() == [float(source)] * 5
        seen.append(source)
    assert sorted(seen) == list(range(1, size))


def check_large_messages_move_on_during_collectives_and_without_a_waiter():
    rank = dist.get_rank()
    if rank == 0:
        work = dist.isend(torch.arange(float(BIG)), 1)
        dist.all_reduce(torch.ones(3))  # rank 1 comes here only after it has received
        work.wait()
        work = dist.isend(torch.arange(float(BIG)), 1)
        deadline = time.monotonic() + 10
        while not work.is_completed() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert work.is_completed()
    else:
        x = torch.empty(BIG)
        if rank == 1:
            dist.recv(x, 0)
            assert x[-1] == BIG - 1
        dist.all_reduce(torch.ones(3))
        if rank == 1:
            dist.recv(x, 0)
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
