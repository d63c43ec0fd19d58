"""Ways in which an MPI job ends.

    mpiexec -n 2 python endings.py ENDING

Each rank says what it saw in lines `SEEN <rank> <words>`.
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from mpi4py import MPI

from unisono.comm import detect, start_world
from unisono.comm.engines.mpi import groups
from unisono.errors import RankFailed

RANK = MPI.COMM_WORLD.rank


def seen(*words):
    """Say something in one piece: several ranks write to one terminal."""
    os.write(1, f"SEEN {RANK} {' '.join(map(str, words))}\n".encode())


def main():
    """Start a world, then end in the way that was asked for."""
    comm = start_world(detect(), backend="mpi", timeout_s=20)
    ENDINGS[sys.argv[1]](comm)


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
