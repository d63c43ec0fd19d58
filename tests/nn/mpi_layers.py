"""Compare every kind of layer with torch on this rank of an MPI job, over the MPI transport.

mpiexec -n 2 python mpi_layers.py
"""

from __future__ import annotations

import faulthandler
import importlib.util
import json
import os
import traceback
from pathlib import Path

import torch
from mpi4py import MPI

import unisono
import unisono.nn as unn
from unisono.topology import Partition


def load_zoo():
    """Return the cases of the other proofs."""
    spec = importlib.util.spec_from_file_location("cases", Path(__file__).with_name("conftest.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.zoo()


def from_an_mpi_communicator():
    """Partitions may count their ranks in an mpi4py communicator, here in the other order."""
    turned = MPI.COMM_WORLD.Split(0, -MPI.COMM_WORLD.rank)
    P = Partition([1, turned.size], comm=turned)
    x = torch.arange(8.0).reshape(2, 4)
    y = unn.Repartition(P, Partition([turned.size, 1], comm=turned))(x[P.local_slices(x.shape)])
    assert torch.equal(y, x[turned.rank : turned.rank + 1])


def main():
    """Run them up to the first that fails."""
    faulthandler.dump_traceback_later(200, exit=True)
    torch.set_num_threads(1)
    os.environ["UNISONO_CORE"] = "0"  # ranks of one host talk over MPI, as those of several
    comm = unisono.comm.start_world(unisono.comm.detect(), backend="mpi")
    names = []
    try:
        assert comm.backend == "mpi4py", comm.backend
        assert unisono.world().size == comm.size
        for case in load_zoo():
            case.check()
            names.append(case.name)
        from_an_mpi_communicator()
    except BaseException:
        traceback.print_exc()
        MPI.COMM_WORLD.Abort(1)
    if comm.rank == 0:
        print(f"PASSED {json.dumps(names)}", flush=True)


if __name__ == "__main__":
    main()
