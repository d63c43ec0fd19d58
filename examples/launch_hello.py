"""One function on as many ranks as you like: `python examples/launch_hello.py --ranks 4`.

It also runs unchanged under `unisono run`, torchrun, mpiexec and srun: see launch_everywhere.sh.
"""

from __future__ import annotations

import argparse

import torch

import unisono


def hello(greeting):
    comm = unisono.world()
    total = comm.all_reduce(torch.tensor(comm.rank))
    print(f"{greeting} from rank {comm.rank} of {comm.size}; all our ranks add up to {total}")
    return comm.rank


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--on", help="cpu (default), gpu, mpi, slurm or inline")
    parser.add_argument("--ranks", type=int)
    options = parser.parse_args()
    results = unisono.run(hello, "hello", on=options.on, ranks=options.ranks)
    if unisono.world().rank == 0:
        print(f"returned: {list(results)} after {results.wall_s:.2f} s")


main()
