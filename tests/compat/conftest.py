"""What tests of other libraries' programs share: how a user starts them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from unisono.comm.engines.mpi import library


@pytest.fixture
def mpiexec():
    """Return the program that starts ranks of MPI; without it the test is skipped."""
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    why = library.unavailable() or ("mpiexec is not installed" if found is None else None)
    if why is not None:
        if "mpi" in os.environ.get("UNISONO_REQUIRE", "").split(","):
            pytest.fail(f"UNISONO_REQUIRE wants mpi, but {why}")
        pytest.skip(why)
    return found


@pytest.fixture
def printed_by(warm_python, tmp_path):
    """Return a function that runs a script, behind other words, and returns what it printed."""

    def run(script, *before, **environment):
        done = subprocess.run(
            [*before, warm_python, str(script)],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout

    return run
