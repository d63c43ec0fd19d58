"""A program written for DistDL: only the import lines change, and any number of ranks will do."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "distdl_script.py"


def epochs(printed):
    """Return the accuracy of each epoch and the ranks, from what the script has printed."""
    assert "largest difference of a loss" in printed
    found = re.findall(r"epoch \d: (\S+) right with ranks=(\d)", printed)
    return [accuracy for accuracy, _ in found], {int(ranks) for _, ranks in found}


@pytest.mark.mpi
@pytest.mark.timeout(600)
def test_a_training_script_gives_the_same_in_one_process_and_under_mpiexec(printed_by, mpiexec):
    alone, ranks = epochs(printed_by(EXAMPLE))
    assert (len(alone), ranks) == (3, {1})
    assert epochs(printed_by(EXAMPLE, mpiexec, "-n", "2")) == (alone, {2})


def test_the_script_runs_for_as_few_epochs_as_its_user_wants(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "mpi4py", None)  # ranks by torch.distributed: one, here
    runpy.run_path(str(EXAMPLE), run_name="script")["main"](1)
    assert capsys.readouterr().out.count("epoch") == 1


PARTITIONS = """\
import numpy as np
from mpi4py import MPI
from unisono.compat.distdl.backends import mpi

P = mpi.Partition(MPI.COMM_WORLD)
assert P._comm is P._root is MPI.COMM_WORLD
low = P.create_partition_inclusive([0, 1])
last = P.create_partition_inclusive([2])
if low.active:
    assert isinstance(low._comm, MPI.Intracomm) and low._comm.allgather(P.rank) == [0, 1]
    out = np.zeros(1)
    low._comm.Allreduce(np.array([P.rank + 1.0]), out, mpi.operation_map["prod"])
    assert out[0] == 2
    assert P.create_partition_inclusive([0, 1])._comm is low._comm
else:
    assert low._comm == MPI.COMM_NULL and low.rank == MPI.PROC_NULL and low.size == -1
assert mpi.compare.check_null_comm(low._comm) != low.active
assert (low == P.create_partition_inclusive([0, 1])) == low.active
union = last.create_partition_union(low)
assert union._comm.allgather(P.rank) == [2, 0, 1]
send, recv = low.create_cartesian_topology_partition([1, 2]).create_broadcast_partition_to(
    P.create_partition_inclusive([2, 1]).create_cartesian_topology_partition([1, 2])
)
if recv.active:
    assert recv._comm.bcast(P.rank if recv.rank == 0 else None) == [None, 1, 0][P.rank]
elif send.active:
    send._comm.bcast(P.rank)
half = mpi.Partition(MPI.COMM_WORLD.Split(P.rank % 2))
assert half.size == (2 if P.rank % 2 == 0 else 1)
group = MPI.COMM_WORLD.Get_group().Incl([1, 2])
pair = mpi.Partition(MPI.COMM_NULL, group, MPI.COMM_WORLD)
assert pair._group == (1, 2) and pair.active == (P.rank > 0)
assert mpi.compare.check_identical_comm(P._comm, MPI.COMM_WORLD)
assert mpi.compare.check_identical_group(group, group)
P.print_sequential(f"rank {P.rank} of {P.size} is done")
"""


@pytest.mark.mpi
@pytest.mark.timeout(300)
def test_partitions_over_mpi_are_real_communicators(printed_by, tmp_path, mpiexec):
    (tmp_path / "partitions.py").write_text(PARTITIONS)
    printed = printed_by("partitions.py", mpiexec, "-n", "3")
    assert printed.splitlines() == [f"rank {r} of 3 is done" for r in range(3)]


SIZES = """
import torch
from mpi4py import MPI
import unisono.compat.distdl as distdl
from unisono.compat.distdl.utilities.slicing import (
    assemble_slices, compute_start_index, compute_stop_index,
)

def block(x, P):
    return x[assemble_slices(*(end(P.shape, P.index, x.shape)
                               for end in (compute_start_index, compute_stop_index)))]

everybody = MPI.COMM_WORLD
whole = torch.arange(35.0).reshape(5, 7)
for size in (2, 4, 3, 4, 1, 2):
    comm = everybody.Split(0 if everybody.rank < size else 1)
    if everybody.rank < size:
        P = distdl.backends.mpi.Partition(comm)
        P_x, P_y = (P.create_cartesian_topology_partition(s) for s in ([1, size], [size, 1]))
        x = block(whole, P_x).clone().requires_grad_()
        y = distdl.nn.Repartition(P_x, P_y)(x)
        assert torch.equal(y, block(whole, P_y))
        y.backward(2 * y.detach())
        assert torch.equal(x.grad, 2 * x)
        total = distdl.nn.AllSumReduce(P_x, axes_reduce=(1,))(torch.ones(1, 3))
        assert total.tolist() == [[float(size)] * 3]
    everybody.Barrier()
print(f"rank {everybody.rank} is done", flush=True)
"""


@pytest.mark.mpi
@pytest.mark.timeout(300)
def test_communicators_of_different_sizes_serve_one_after_the_other(printed_by, tmp_path, mpiexec):
    """As in DistDL's own suite: each test splits off the ranks it needs, and 2 of 4 come first."""
    (tmp_path / "sizes.py").write_text(SIZES)
    printed = printed_by("sizes.py", mpiexec, "-n", "4")
    assert sorted(printed.splitlines()) == [f"rank {r} is done" for r in range(4)]
