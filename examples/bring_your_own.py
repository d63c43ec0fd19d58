"""Shared memory in plain torch code: one import, and `"shm"` is a backend like any other.

Nothing else of unisono is used: torch's own launcher of processes, its own process group, its own
collectives. Also runs under `torchrun --nproc-per-node 2 examples/bring_your_own.py`.
"""

from __future__ import annotations

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import unisono.comm  # noqa: F401  (registers the backends "shm" and "mpi4py")


def work(rank, ranks, path):
    store = dist.FileStore(path, ranks) if path else None
    dist.init_process_group("shm", store=store, rank=rank, world_size=ranks)
    x = torch.full((1 << 18,), float(rank + 1), dtype=torch.bfloat16)
    dist.all_reduce(x)
    pieces = [torch.empty(rank_size) for rank_size in range(1, ranks + 1)]
    dist.all_gather(pieces, torch.full((rank + 1,), float(rank)))  # uneven: gloo refuses this
    if rank == 0:
        total = sum(range(1, ranks + 1))
        print(f"sum over {ranks} ranks: {x[0].item():.0f} (expected {total})")
        print(f"gathered blocks of lengths {[len(piece) for piece in pieces]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        work(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), None)
    else:
        with tempfile.TemporaryDirectory() as scratch:
            mp.spawn(work, (options.ranks, f"{scratch}/store"), nprocs=options.ranks)
