"""MPI's style on one rank: arithmetic, constants, refusals; how it finds the world."""

from __future__ import annotations

import copy
import os
import pickle
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.comm import Communicator, world
from unisono.comm.mpi_style import (
    MPI,
    MPI_SELF,
    MPI_WORLD,
    Communication,
    MPICommunication,
    Request,
    buffers,
    constants,
    get_comm,
    sanitize_comm,
    use_comm,
)
from unisono.errors import MeshError, PartitionError


@given(st.integers(0, 50), st.integers(1, 9))
def test_chunks_tile_an_array_in_rank_order_and_differ_by_at_most_one_row(n, size):
    parts = [buffers.chunk((3, n), 1, rank, size) for rank in range(size)]
    rows = [row for offset, (_, length), _ in parts for row in range(offset, offset + length)]
    assert rows == list(range(n))
    counts, displs = buffers.counts_displs(n, size)
    assert counts == tuple(shape[1] for _, shape, _ in parts)
    assert displs == tuple(offset for offset, _, _ in parts)
    assert max(counts) - min(counts) <= 1
    assert sorted(counts, reverse=True) == list(counts)
    assert all(s == (slice(0, 3), slice(o, o + sh[1])) for o, sh, s in parts)


def test_chunk_in_all_its_forms():
    assert MPI_WORLD.chunk((7, 2), 0, rank=2, w_size=3) == (5, (2, 2), (slice(5, 7), slice(0, 2)))
    assert MPI_WORLD.chunk((7, 2), -2, rank=0, w_size=3, sparse=True) == (0, 3)
    assert MPI_WORLD.chunk((7, 2), None) == (0, (7, 2), (slice(0, 7), slice(0, 2)))
    assert MPI_WORLD.counts_displs_shape((7, 2), 0) == ((7,), (0,), (7, 2))
    with pytest.raises(PartitionError, match="2 dims"):
        MPI_WORLD.chunk((7, 2), 2)
    with pytest.raises(MeshError, match="3 >= 3"):
        MPI_WORLD.chunk((7, 2), 0, rank=3, w_size=3)
    with pytest.raises(TypeError, match="split"):
        MPI_WORLD.chunk((7, 2), "0")


def test_the_default_communicator_can_be_changed_and_none_leaves_it():
    assert get_comm() is MPI_WORLD
    assert sanitize_comm(None) is MPI_WORLD
    try:
        use_comm(MPI_SELF)
        use_comm(None)
        assert get_comm() is MPI_SELF
        use_comm(world())
        assert get_comm().handle == world()
    finally:
        use_comm(MPI_WORLD)
    for wrong in ("x", 3, object()):
        with pytest.raises(TypeError, match="ProcessGroup"):
            sanitize_comm(wrong)


def test_a_communicator_converts_copies_and_pickles():
    assert isinstance(MPI_WORLD, Communication)
    assert Communicator.of(MPI_WORLD) == world()
    assert sanitize_comm(world()) == MPI_WORLD
    assert copy.deepcopy(MPI_WORLD) is MPI_WORLD
    assert pickle.loads(pickle.dumps(MPI_WORLD)) == MPI_WORLD
    assert type(pickle.loads(pickle.dumps(MPI_SELF))) is type(MPI_SELF)
    assert MPI.COMM_WORLD is MPI_WORLD
    assert MPI.COMM_SELF is MPI_SELF
    assert MPI_WORLD.handle == world()


def test_all_verbs_work_in_a_world_of_one_and_requests_are_complete():
    comm = MPICommunication()
    assert (comm.rank, comm.size, comm.Get_rank(), comm.Get_size()) == (0, 1, 0, 1)
    assert not comm.is_distributed()
    x = torch.arange(6.0).reshape(2, 3)
    for verb in ("Allreduce", "Reduce", "Scan", "Allgather", "Alltoall", "Gather", "Scatter"):
        out = torch.zeros(2, 3)
        getattr(comm, verb)(x, out)
        assert torch.equal(out, x), verb
        later = torch.zeros(2, 3)
        request = getattr(comm, f"I{verb.lower()}")(x, later)
        assert isinstance(request, Request)
        assert request.Test()
        assert torch.equal(later, x), verb
    for verb in ("Allgatherv", "Gatherv", "Alltoallv", "Scatterv"):
        out = torch.zeros(3, 3)
        send = (x, [2], [0]) if verb in ("Alltoallv", "Scatterv") else x
        recv = out[1:] if verb == "Scatterv" else (out, [2], [1])
        getattr(comm, verb)(send, recv)
        assert torch.equal(out[1:], x), verb
        assert torch.equal(out[0], torch.zeros(3))
    untouched = torch.full((2, 3), 7.0)
    comm.Exscan(x, untouched)
    assert torch.equal(untouched, torch.full((2, 3), 7.0))
    comm.Bcast(x)
    comm.Barrier()
    comm.Ibarrier().wait()
    assert comm.bcast("a") == "a"
    assert comm.allgather(1) == comm.gather(1) == [1]
    assert comm.scatter([5]) == comm.allreduce(5) == 5
    assert comm.Split().size == 1


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda c: c.Allreduce(torch.ones(2), torch.ones(3)), ValueError, "2 != 3"),
        (lambda c: c.Allreduce(torch.ones(2), torch.ones(2).int()), ValueError, "dtype"),
        (lambda c: c.Allreduce([1], torch.ones(1)), TypeError, "list"),
        (lambda c: c.Allreduce(torch.ones(2), torch.ones(2), MPI.BAND), RuntimeError, "float32"),
        (lambda c: c.Allreduce(torch.ones(2), torch.ones(2), "sum"), TypeError, "MPI.SUM"),
        (
            lambda c: c.Allreduce(torch.ones(2), torch.ones(2), MPI.MINLOC),
            NotImplementedError,
            "Allreduce the values with MIN",
        ),
        (
            lambda c: c.Allreduce(torch.ones(2), torch.ones(2), MPI.MAXLOC),
            NotImplementedError,
            "with MAX",
        ),
        (lambda c: c.Alltoallw(), NotImplementedError, "Alltoallv"),
        (lambda c: c.Bcast(torch.ones(2), root=1), ValueError, "0 <= 1 < 1"),
        (lambda c: c.Send(torch.ones(2), 1), ValueError, "0 <= 1 < 1"),
        (lambda c: c.Send(torch.ones(2), 0, tag=-3), ValueError, "-3 < 0"),
        (lambda c: c.Recv(torch.ones(2), 2), ValueError, "0 <= 2 < 1"),
        (lambda c: c.Allgather(torch.ones(2), torch.ones(3)), ValueError, "2 != 3"),
        (lambda c: c.Allgather(torch.ones(2, 3), torch.ones(3, 2), 1), ValueError, r"\[2, 3\]"),
        (lambda c: c.Allgatherv(torch.ones(2), (torch.ones(3), [4], [0])), ValueError, "4 > 3"),
        (lambda c: c.Alltoall(torch.ones(2), torch.ones(3)), ValueError, r"\[3\] != \[2\]"),
        (lambda c: c.Alltoallv((torch.ones(2), [1, 1]), torch.ones(2)), ValueError, "2 != 1"),
        (lambda c: c.Gather(torch.ones(2), None), ValueError, "root"),
        (lambda c: c.Scatter(torch.ones(2), torch.ones(3)), ValueError, "3"),
        (lambda c: c.Scatterv((torch.ones(2), [2]), torch.ones(1)), ValueError, "2 != 1"),
        (lambda c: c.scatter([1, 2]), ValueError, "2 != 1"),
        (lambda c: c.Bcast(np.ones(3)[::-1]), ValueError, "backwards"),
        (lambda c: c.Free(), ValueError, "world"),
    ],
)
def test_wrong_input_is_refused_with_the_numbers(call, kind, words):
    with pytest.raises(kind, match=words):
        call(MPICommunication())


def test_mpi4py_constants_are_recognised_and_none_of_ours_collides():
    mpi = pytest.importorskip("mpi4py.MPI", exc_type=ImportError)
    for op in constants.OPS:
        assert constants.as_op(getattr(mpi, op.name), "Allreduce") is op
    assert constants.is_in_place(mpi.IN_PLACE)
    assert constants.is_any_source(mpi.ANY_SOURCE)
    assert constants.is_any_source(constants.ANY_SOURCE)
    assert constants.is_any_tag(mpi.ANY_TAG)
    assert constants.is_proc_null(mpi.PROC_NULL)
    assert constants.is_undefined(mpi.UNDEFINED)
    assert not constants.is_proc_null(mpi.ANY_SOURCE)
    assert not constants.is_any_source(mpi.PROC_NULL)
    with pytest.raises(TypeError, match=r"MPI\.SUM"):
        constants.as_op(mpi.REPLACE, "Allreduce")


def test_nobody_is_a_partner_for_messages():
    comm, out = MPICommunication(), torch.full((2,), 3.0)
    comm.Send(torch.ones(2), MPI.PROC_NULL)
    comm.Recv(out, MPI.PROC_NULL)
    assert out.tolist() == [3.0, 3.0]


# -- the world that is found at first use ------------------------------------------------------


LAZY = """
import time

import torch
from unisono.comm.mpi_style import MPI, MPI_WORLD

comm = MPI_WORLD
right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
comm.Send(torch.full((30_000,), float(comm.rank)), right, tag=3)
got = torch.empty(30_000)
comm.Recv(got, left, MPI.ANY_TAG)
assert (got == left).all()
comm.Send(torch.ones(30_000), right)
if comm.rank == 0:
    comm.Recv(got)
    comm.Barrier()
else:
    comm.Barrier()
    comm.Recv(got)
if comm.rank == 0:
    comm.Send(torch.ones(30_000), right)  # and on to the end of the program
else:
    time.sleep(1)
    comm.Recv(got.zero_(), left)
    assert got.sum() == 30_000
comm.send("last words", right)  # nobody receives them, and the job ends nevertheless
seen = comm.gather(f"SEEN {comm.rank} {comm.size} {comm.handle.backend}")
if comm.rank == 0:
    print(*seen, sep="\\n")
"""


@pytest.mark.mpi
@pytest.mark.timeout(300)
def test_the_world_is_found_at_first_use_under_mpiexec_and_closed_at_the_end(mpiexec, tmp_path):
    """In interpreters of its own, as a user has."""
    script = tmp_path / "lazy.py"
    script.write_text(LAZY)
    done = subprocess.run(
        [mpiexec, "-n", "2", sys.executable, "-W", "ignore", str(script)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "UNISONO_TIMEOUT_S": "60"},
    )
    assert done.returncode == 0, done.stdout[-5000:]
    seen = re.findall(r"SEEN (\d) 2 (\w+)", done.stdout)
    assert sorted(rank for rank, _ in seen) == ["0", "1"]
    assert len({backend for _, backend in seen}) == 1


def test_the_world_is_found_in_a_process_of_its_own(interpreter, tmp_path):
    script = tmp_path / "alone.py"
    script.write_text("from unisono.comm.mpi_style import MPI_WORLD\nprint(MPI_WORLD.size)\n")
    done = interpreter.run([str(script)], cwd=tmp_path)
    assert done.stdout == "1\n", done.stderr
