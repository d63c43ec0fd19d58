"""The verbs of MPI without MPI: sums, splits of an array, groups of ranks, a shuffle in a ring.

python examples/mpi_style.py --ranks 4
mpiexec -n 4 python examples/mpi_style.py
"""

from __future__ import annotations

import argparse

import numpy as np
import torch

import unisono
from unisono.comm.mpi_style import MPI, MPI_WORLD, Request, Status


def say(comm, text):
    """Print the texts of all ranks, in order."""
    texts = comm.gather(text, root=0)
    if comm.rank == 0:
        print(*texts, sep="\n", flush=True)


def sums_and_splits(comm):
    """Reduce, scan, and turn an array split by rows into one split by columns."""
    total = torch.zeros(3)
    comm.Allreduce(torch.full((3,), comm.rank + 1.0), total, op=MPI.SUM)
    before = np.empty(1, dtype=np.int64)
    comm.Scan(np.array([comm.rank]), before)
    whole = torch.arange(6.0 * 5).reshape(6, 5)
    rows = whole[comm.chunk(whole.shape, split=0)[2]]
    columns = torch.empty(comm.chunk(whole.shape, split=1)[1])
    comm.Alltoall(rows, columns, send_axis=1, recv_axis=0)
    assert torch.equal(columns, whole[comm.chunk(whole.shape, split=1)[2]])
    say(
        comm,
        f"rank {comm.rank}: sum {total[0]:.0f}, scan {before[0]}, "
        f"rows {list(rows.shape)} became columns {list(columns.shape)}",
    )


def groups(comm):
    """Split the ranks in even and odd ones, the highest first."""
    half = comm.Split(color=comm.rank % 2, key=-comm.rank)
    members = half.allgather(comm.rank)
    say(comm, f"rank {comm.rank} is rank {half.rank} of {members}")
    half.Free()


def ring_shuffle(comm, rows, generator):
    """Pass half of the rows on to the next rank, and mix what is here then."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    half = len(rows) // 2
    arriving = torch.empty_like(rows[:half])
    Request.Waitall([comm.Irecv(arriving, left), comm.Isend(rows[:half], right)])
    return torch.cat([arriving, rows[half:]])[torch.randperm(len(rows), generator=generator)]


def collect(comm):
    """Let rank 0 take a message of each other rank; over MPI the source may be any."""
    if comm.rank > 0:
        comm.Send(torch.arange(float(comm.rank)), dest=0, tag=comm.rank)
        return
    seen = []
    for source in range(1, comm.size):
        room, status = torch.empty(source), Status()
        comm.Recv(room, source, source, status)
        seen.append((status.Get_source(), status.Get_count()))
    assert sorted(seen) == [(rank, rank) for rank in range(1, comm.size)]
    print(f"rank 0 took {len(seen)} messages", flush=True)


def main():
    comm = MPI_WORLD
    sums_and_splits(comm)
    groups(comm)
    rows, generator = torch.arange(4) + 10 * comm.rank, torch.Generator().manual_seed(comm.rank)
    for _ in range(3):
        rows = ring_shuffle(comm, rows, generator)
    everything = comm.allreduce(rows.tolist())
    assert sorted(everything) == [10 * r + i for r in range(comm.size) for i in range(4)]
    say(comm, f"rank {comm.rank} after three shuffles: {rows.tolist()}")
    collect(comm)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=None)
    unisono.run(main, ranks=parser.parse_args().ranks)
