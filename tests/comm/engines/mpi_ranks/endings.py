"""Ways in which an MPI job ends, and levels of threads that MPI may allow.

    MPI4PY_RC_THREAD_LEVEL=serialized mpiexec -n 2 python endings.py ENDING

Each rank says what it saw in lines `SEEN <rank> <words>`.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings

import torch
import torch.distributed as dist
from mpi4py import MPI

from unisono.comm import detect, start_world
from unisono.comm.engines.mpi import groups
from unisono.errors import RankFailed, UnisonoError

RANK = MPI.COMM_WORLD.rank


def seen(*words):
    """Say something in one piece: several ranks write to one terminal."""
    os.write(1, f"SEEN {RANK} {' '.join(map(str, words))}\n".encode())


def calls_of_all_kinds(comm):
    """Collectives now and later, messages, DDP: right at every level of threads."""
    x = torch.full((50_000,), float(comm.rank + 1))
    pending = [comm.start.all_reduce(x) for _ in range(3)]
    now = comm.all_reduce(x)
    assert all(torch.equal(later.wait(), now) for later in pending)
    work = dist.all_reduce(x, async_op=True)
    assert work.get_future().wait()[0] is x
    peer = 1 - comm.rank
    got = comm.exchange({peer: x}, {peer: x})[peer]
    assert torch.equal(got, x)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    for _ in range(3):
        model(torch.full((2, 4), float(comm.rank))).sum().backward()
    gradients = comm.all_gather(model.module.weight.grad.reshape(1, -1))
    assert torch.equal(gradients[0], gradients[1])


def main():
    """Run at the level of threads, then end in the way that was asked for."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        comm = start_world(detect(), backend="mpi", timeout_s=20)
        calls_of_all_kinds(comm)
        warned = [w for w in caught if "initialised for one thread" in str(w.message)]
    seen("level", MPI.Query_thread(), "warnings", len(warned))
    seen("background", any(t.name.startswith("unisono-mpi") for t in threading.enumerate()))
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        thread = threading.Thread(target=in_a_thread, args=(comm,))
        thread.start()
        thread.join()
    ENDINGS[sys.argv[1]](comm)


def in_a_thread(comm):
    """Use the group where MPI does not expect it."""
    try:
        comm.barrier()
    except UnisonoError as error:
        seen("thread", str(error).splitlines()[1].strip())


def end_by_an_exception(comm):
    """Rank 1 raises; rank 0 waits for it in a collective without a near deadline."""
    if comm.rank == 1:
        raise ValueError("raised on purpose")
    began = time.monotonic()
    try:
        comm.with_timeout(300).all_reduce(torch.ones(3))
    except RankFailed as error:
        seen("failed", error.rank, "raised on purpose" in str(error), time.monotonic() - began < 5)
        raise


def end_by_an_exception_and_clean_up(comm):
    """Rank 1 raises and destroys its groups; rank 0 waits."""
    if comm.rank == 1:
        try:
            raise ValueError("raised on purpose")
        finally:
            dist.destroy_process_group()
    try:
        comm.with_timeout(300).all_reduce(torch.ones(3))
    except RankFailed as error:
        seen("left", error.rank, "has closed the group" in str(error))


def end_beside_a_hung_rank(comm):
    """Rank 1 never comes; rank 0 gives up, and the whole job ends."""
    groups.GRACE_S = 1.0
    if comm.rank == 1:
        time.sleep(300)
    comm.with_timeout(0.5).all_reduce(torch.ones(3))


ENDINGS = {
    name.removeprefix("end_"): function
    for name, function in list(vars().items())
    if name.startswith("end_")
}

if __name__ == "__main__":
    main()
