"""Communicators of mpi4py that stand on their own, in an MPI job of 4 ranks.

    mpiexec -n 4 python standalone.py CASE...

Each rank says what it saw in lines `SEEN <rank> <words>`.
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from mpi4py import MPI

from unisono.comm import Communicator, check, detect, start_world, stop_world, trace, world
from unisono.errors import CollectiveMismatch, RankFailed, RankTimeout

ALL = MPI.COMM_WORLD
RANK = ALL.rank


def seen(*words):
    """Say something in one piece: several ranks write to one terminal."""
    os.write(1, f"SEEN {RANK} {' '.join(map(str, words))}\n".encode())


def raised(kind, call):
    """Return the error of `kind` that `call` raises."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__} was raised")


def of_some(ranks):
    """Return the communicator of these ranks of MPI; ranks outside do nothing and get None."""
    if RANK not in ranks:
        return None
    everybody = ALL.Get_group()
    return Communicator.of(ALL.Create_group(everybody.Incl(list(ranks))))


def use(comm, ranks):
    """Use a communicator of these ranks of MPI in several ways."""
    assert (comm.rank, comm.size) == (ranks.index(RANK), len(ranks))
    assert comm.ranks == tuple(ranks) or comm.group in dist.distributed_c10d._world.pg_map
    assert comm.backend == ("mpi4py" if os.environ["UNISONO_CORE"] == "0" else "shm")
    total = comm.all_reduce(torch.tensor([float(RANK)], dtype=torch.bfloat16))
    assert float(total) == sum(ranks)
    rows = comm.all_gather(torch.full((comm.rank, 2), RANK))
    assert rows.tolist() == [[q, q] for place, q in enumerate(ranks) for _ in range(place)]
    assert comm.all_gather_object({"rank": RANK}) == [{"rank": q} for q in ranks]
    later = comm.start.all_reduce(torch.ones(1000))
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    got = comm.exchange({right: torch.tensor([RANK])}, {left: torch.tensor([0])})
    assert int(got[left]) == ranks[left]
    assert later.wait().unique().tolist() == [float(comm.size)]
    comm.barrier()


PAIR, THREE, WHOLE = [1, 3], [0, 1, 2], [0, 1, 2, 3]
ORDERS = ((PAIR, WHOLE, THREE), (THREE, PAIR, WHOLE), (WHOLE, THREE, PAIR))


def in_every_order(orders=ORDERS):
    """Communicators of 2, 4, 3 ranks and a duplicate, each of them first, with the same result."""
    for order in orders:
        made = []
        for ranks in order:
            comm = of_some(ranks)
            if comm is not None:
                use(comm, ranks)
                made.append(comm)
        again = Communicator.of(ALL.Dup())
        use(again, WHOLE)
        for comm in [*made, again]:
            comm.close()


def case_any_order():
    """No world before, none after."""
    in_every_order()
    assert not dist.is_initialized()
    assert world().size == 1
    assert Communicator.of(MPI.COMM_SELF).size == 1


def case_beside_a_world():
    """The same beside worlds of torch.distributed: of all ranks, and of some of them."""
    for backend in ("gloo", "mpi"):
        start_world(detect(), backend=backend, timeout_s=30)
        in_every_order()
        assert float(world().all_reduce(torch.ones(1))) == 4
        stop_world()
        in_every_order(ORDERS[:1])
    part = ALL.Split(RANK % 2)
    if RANK % 2:  # ranks 1 and 3 have a world of their own, the others none
        store = mpi_store(part)
        dist.init_process_group("gloo", store=store, rank=part.rank, world_size=2)
    in_every_order()
    if RANK % 2:
        assert float(world().all_reduce(torch.ones(1))) == 2
        stop_world()


def mpi_store(comm):
    """Return a store of the ranks of `comm`."""
    from unisono.comm.engines import mpi

    return mpi.store_of(comm)


def case_a_world_that_comes_later():
    """A communicator made before the world keeps working while the world comes and goes."""
    comm = of_some([0, 1, 2, 3])
    use(comm, [0, 1, 2, 3])
    start_world(detect(), backend="gloo", timeout_s=30)
    use(comm, [0, 1, 2, 3])
    assert Communicator.of(ALL) == comm
    assert world() != comm
    stop_world()
    use(comm, [0, 1, 2, 3])


def case_everything_works():
    """Parts, splits, shared buffers, check mode, traces, pickles, gradients through layers."""
    comm = Communicator.of(ALL)
    part = comm.sub([3, 1])
    assert (part is None) == (RANK in (0, 2))
    if part is not None:
        use(part, [3, 1])
        assert comm.sub([3, 1]) == part
        assert part != comm
        inner = part.split(part.rank)
        assert (inner.size, inner.ranks) == (1, (RANK,))
    halves = comm.split(RANK % 2, key=-RANK)
    use(halves, [2, 0] if RANK % 2 == 0 else [3, 1])
    assert len(comm.hosts) == 4
    buffer = comm.shared_buffer((3,), torch.float32)
    buffer += RANK
    assert comm.all_reduce(buffer).tolist() == [6.0] * 3
    with trace() as t:
        comm.all_reduce(torch.ones(100))
    assert [(e.op, e.rank, e.sent) for e in t.events] == [("all_reduce", RANK, 400)]
    with check():
        comm.barrier()
        error = raised(CollectiveMismatch, lambda: comm.all_reduce(torch.ones(3 + RANK)))
    assert "different shapes" in str(error)
    assert "rank 3 |" in str(error)
    use(comm, [0, 1, 2, 3])
    layers(comm)


def layers(comm):
    """Partitions, data-parallel gradients and MPI's verbs on such a communicator."""
    import unisono
    import unisono.nn as unn
    from unisono.comm.mpi_style import MPICommunication
    from unisono.topology import Partition

    P = Partition([1, 4], comm=ALL)
    x = torch.arange(16.0).reshape(4, 4)
    y = unn.Repartition(P, Partition([4, 1], comm=ALL))(x[P.local_slices(x.shape)])
    assert torch.equal(y, x[RANK : RANK + 1])
    net = unisono.DataParallel(torch.nn.Linear(4, 1, bias=False), comm=comm)
    net(x[RANK : RANK + 1]).sum().backward()
    [weight] = net.parameters()
    torch.testing.assert_close(weight.grad, x.mean(0, keepdim=True))
    style = MPICommunication(ALL)
    style.send(RANK, (RANK + 1) % 4)
    assert style.recv() == (RANK - 1) % 4  # from any source


def case_a_stalled_rank():
    """Rank 3 does not come: the others name it, with its stack, within the deadline."""
    comm = Communicator.of(ALL)
    comm.barrier()
    if RANK != 3:
        began = time.monotonic()
        error = raised(RankTimeout, lambda: comm.all_reduce(torch.ones(2), timeout_s=1.0))
        assert time.monotonic() - began < 15
        seen("missing", list(error.missing), "stack", "stalled_here" in error.stacks.get(3, ""))
    else:
        stalled_here()
    ALL.Barrier()
    part_without_all_members()


def part_without_all_members():
    """Rank 0 gives up a part that rank 1 makes later; that ends by its deadline, too."""
    comm = Communicator.of(ALL.Split(0, -RANK)).with_timeout(1.0)
    for rank in (0, 1):
        if rank == RANK:
            error = raised(RankTimeout, lambda: comm.sub([3, 2]))  # ranks 0 and 1 of MPI
            assert list(error.missing) == [1 - rank], error
        ALL.Barrier()


def stalled_here():
    time.sleep(3)


def case_a_failing_rank():
    """Rank 1 of a part raises: the others of the part learn of it, ranks outside do nothing."""
    comm = of_some([1, 2, 3])
    if comm is None:
        return
    comm.barrier()
    if RANK == 1:
        raise ValueError("raised on purpose")
    error = raised(RankFailed, lambda: comm.all_reduce(torch.ones(2), timeout_s=60.0))
    seen("failed", error.rank, "raised on purpose" in str(error))


def case_different_calls():
    """Ranks that wait in different calls are named, and so is one that has returned."""
    comm = of_some([0, 2])
    if comm is not None:
        src = 1 - comm.rank  # each waits for the other
        error = raised(CollectiveMismatch, lambda: comm.broadcast(torch.ones(1), src))
        seen("mismatch", "make different calls" in str(error))
    other = of_some([1, 3])
    if other is not None:
        other.barrier()
        if RANK == 3:
            error = raised(CollectiveMismatch, lambda: other.barrier(timeout_s=60))
            seen("mismatch", "will not come" in str(error))


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ.setdefault("UNISONO_TIMEOUT_S", "30")
    for case in sys.argv[1:]:
        globals()[f"case_{case}"]()
        seen(case, "done")
