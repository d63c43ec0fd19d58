"""The verbs of a communicator and the messages of torch, over MPI."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from mpi4py import MPI

from unisono.comm import check, trace, world
from unisono.comm.mpi_style import MPI_WORLD, MPICommunication
from unisono.errors import CollectiveMismatch, UnisonoError

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint64,
    torch.bool,
    torch.complex64,
]
BIG = 300_000


def raised(kind, call):
    """Return the error of `kind` that `call` raises."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__} was raised")


def rows(rank, n, dtype):
    return ((torch.arange(n * 3).view(n, 3) + rank) % 3).to(dtype)


def got(pending):
    return pending.wait() if hasattr(pending, "wait") else pending


def check_every_verb_with_every_dtype_uneven_strided_and_later():
    c = world()
    for dtype in DTYPES:
        for verbs in (c, c.start):
            sizes = [2 * r % 5 for r in range(c.size)]
            mine = rows(c.rank, sizes[c.rank], dtype)
            joined = torch.cat([rows(r, n, dtype) for r, n in enumerate(sizes)])
            assert torch.equal(got(verbs.all_gather(mine)), joined)
            strided = mine.t()
            assert torch.equal(got(verbs.all_gather(strided, dim=1, sizes=sizes)), joined.t())
            gathered = got(verbs.gather(mine, dst=1))
            assert (gathered is None) == (c.rank != 1)
            assert gathered is None or torch.equal(gathered, joined)
            whole = rows(1, sum(sizes), dtype)
            scattered = got(verbs.scatter(whole if c.rank == 1 else None, 1, sizes=sizes))
            assert torch.equal(scattered, whole.split(sizes)[c.rank])
            x = rows(c.rank, 4, dtype)
            everybody = [rows(r, 4, dtype) for r in range(c.size)]
            if not dtype.is_complex:
                largest = torch.stack([y.to(torch.int64) for y in everybody]).amax(0)
                found = got(verbs.all_reduce(x, "max"))
                assert torch.equal(found.to(torch.int64), largest)
            assert torch.equal(x, everybody[c.rank])
            assert torch.equal(got(verbs.broadcast(x, 1)), everybody[1])
            sent = got(verbs.all_to_all([x] * c.size))
            pieces = sent if isinstance(sent, (list, tuple)) else sent.split(4)
            assert all(map(torch.equal, pieces, everybody))


def check_sums_means_and_scattered_sums():
    c = world()
    x = torch.arange(6.0).view(2, 3) + c.rank
    ranks = sum(range(c.size))
    assert torch.equal(c.all_reduce(x), torch.arange(6.0).view(2, 3) * c.size + ranks)
    torch.testing.assert_close(
        c.all_reduce(x, "mean"), torch.arange(6.0).view(2, 3) + ranks / c.size
    )
    assert c.reduce(x, 0) is None or c.rank == 0
    sizes = [r + 1 for r in range(c.size)]
    long = torch.arange(float(sum(sizes)))
    part = c.reduce_scatter(long, sizes=sizes)
    assert torch.equal(part, long.split(sizes)[c.rank] * c.size)
    a, b = torch.ones(3), torch.ones(2)
    with c.coalesce():
        later = c.all_reduce(a), c.all_reduce(b)
    assert [float(got(y).sum()) for y in later] == [3.0 * c.size, 2.0 * c.size]
    assert c.all_equal("same")
    assert not c.all_equal(c.rank)


def check_objects_and_exchanges_in_a_ring():
    c = world()
    assert c.all_gather_object({"r": c.rank}) == [{"r": r} for r in range(c.size)]
    assert c.broadcast_object(c.rank, 1) == 1
    left, right = (c.rank - 1) % c.size, (c.rank + 1) % c.size
    for n in (1, BIG):
        found = c.exchange({right: torch.full((n,), float(c.rank))}, {left: torch.empty(n)})
        assert found[left].unique().tolist() == [float(left)]
    if c.rank == 0:
        c.send(torch.arange(4), 1, tag=7)
    if c.rank == 1:
        assert c.recv(torch.empty(4, dtype=torch.int64), 0, tag=7).tolist() == [0, 1, 2, 3]


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
