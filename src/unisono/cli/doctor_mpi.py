"""What `unisono doctor` says of MPI: an mpiexec, and whether mpi4py belongs to it."""

from __future__ import annotations

import os
import subprocess
import sys

from unisono.cli.check import Check


def check_mpi() -> Check:
    """An mpiexec is there, and of the same MPI as mpi4py."""
    from unisono.comm.engines.mpi.library import unavailable
    from unisono.errors import PlatformError
    from unisono.launch.mpiexec import find_mpiexec
    from unisono.launch.platform import Platform

    try:
        mpiexec = find_mpiexec(Platform(device="mpi"))
    except PlatformError as error:
        found = str(error).splitlines()[1].strip().removeprefix("found: ")
        if "MPIEXEC" in os.environ:
            fix = "unset MPIEXEC, or MPIEXEC=/path/of/an/mpiexec"
            return Check("mpi", "warn", found, fix)
        return Check("mpi", "skip", found, 'pip install "unisono[mpi]" mpich, if you need --on mpi')
    found = f"{mpiexec.version} at {mpiexec.path}"
    if (why := unavailable()) is not None:
        return Check("mpi", "ok", f'{found}; backend="mpi" is not there: {why}')
    theirs = "openmpi" if "Open MPI" in _library_of_mpi4py() else "mpich"
    if theirs != mpiexec.flavour:
        found += f", but mpi4py uses {theirs}"
        return Check("mpi", "warn", found, "MPIEXEC=... with the mpiexec of that MPI")
    return Check("mpi", "ok", f"{found}; mpi4py uses the same")


def _library_of_mpi4py() -> str:
    """Ask in a process of its own which library mpi4py loads; here that would start MPI."""
    code = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
    code += "print(MPI.Get_library_version())"
    words = [sys.executable, "-c", code]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False).stdout
