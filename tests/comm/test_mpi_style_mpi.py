"""The MPI-style communicator on ranks that `mpiexec` starts.

One test has interpreters of its own, as a user has; the others fork them from the warm one.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from unisono.comm.engines.mpi import library

HERE = Path(__file__).parent
pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]

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


def mpiexec():
    """Return the program that starts ranks, that of the mpich wheel first."""
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    why = library.unavailable() or ("mpiexec is not installed" if found is None else None)
    if why is not None:
        if "mpi" in os.environ.get("UNISONO_REQUIRE", "").split(","):
            pytest.fail(f"UNISONO_REQUIRE wants mpi, but {why}")
        pytest.skip(why)
    return found


def run_job(python, ranks, *arguments):
    """Run Python with some arguments on some ranks; return what it printed."""
    done = subprocess.run(
        [mpiexec(), "-n", str(ranks), python, "-W", "ignore", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "UNISONO_TIMEOUT_S": "60"},
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_verb_over_the_mpi_transport(interpreter, ranks):
    output = run_job(interpreter.python, ranks, str(HERE / "mpi_style_ranks.py"))
    passed = re.findall(r"^PASSED (\w+)", output, re.MULTILINE)
    assert len(passed) >= 10, output


def test_the_world_is_found_at_first_use_under_mpiexec_and_closed_at_the_end(tmp_path):
    script = tmp_path / "lazy.py"
    script.write_text(LAZY)
    seen = re.findall(r"SEEN (\d) 2 (\w+)", run_job(sys.executable, 2, str(script)))
    assert sorted(rank for rank, _ in seen) == ["0", "1"]
    assert len({backend for _, backend in seen}) == 1


def test_the_world_is_found_in_a_process_of_its_own(interpreter, tmp_path):
    script = tmp_path / "alone.py"
    script.write_text("from unisono.comm.mpi_style import MPI_WORLD\nprint(MPI_WORLD.size)\n")
    done = interpreter.run([str(script)], cwd=tmp_path)
    assert done.stdout == "1\n", done.stderr
