"""Run the tests of `test_mpi_style.py` on this rank of an MPI job, over the MPI transport.

mpiexec -n 2 python mpi_style_ranks.py [words of names]
"""

from __future__ import annotations

import faulthandler
import importlib.util
import sys
import traceback
from pathlib import Path

import torch
from mpi4py import MPI

from unisono.comm import detect, start_world
from unisono.comm.mpi_style import MPI_WORLD, MPICommunication


def cases(size):
    """Return the tests that are meant for so many ranks."""
    spec = importlib.util.spec_from_file_location(
        "bodies", Path(__file__).with_name("test_mpi_style.py")
    )
    bodies = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bodies)
    for name, body in vars(bodies).items():
        for mark in getattr(body, "pytestmark", []) if name.startswith("test_") else []:
            wanted = mark.args[0] if isinstance(mark.args[0], list) else [mark.args[0]]
            if size in wanted:
                yield name, body


def main():
    """Run them up to the first that fails, and say so."""
    faulthandler.dump_traceback_later(200, exit=True)
    torch.set_num_threads(1)
    start_world(detect(), backend="mpi", timeout_s=60)
    comm = MPICommunication(MPI.COMM_WORLD)
    total = torch.ones(1)
    comm.Allreduce(MPI.IN_PLACE, total, op=MPI.SUM)  # mpi4py's own constants
    assert total.item() == comm.size == MPI_WORLD.size
    assert MPI_WORLD.handle.backend in ("mpi4py", "self")
    for name, body in cases(comm.size):
        if len(sys.argv) > 1 and not any(word in name for word in sys.argv[1:]):
            continue
        try:
            body()
        except BaseException:
            traceback.print_exc()
            MPI.COMM_WORLD.Abort(1)
        if comm.rank == 0:
            print(f"PASSED {name}", flush=True)


if __name__ == "__main__":
    main()
