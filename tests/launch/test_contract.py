"""The contract of places, for ranks of this host and of `mpiexec`; Ray and SLURM run it, too."""

from __future__ import annotations

import sys

import pytest
from tests.launch.contract import CASES, OF_ALL_PLACES, Place, shows_stacks

LOCAL = Place("cpu", has_agents=False, result_mb=800)
MPI = Place("mpi", is_elastic=False, result_mb=800)


@OF_ALL_PLACES
def test_ranks_of_this_host(case, tmp_path):
    CASES[case](LOCAL, tmp_path)


@pytest.mark.mpi
@OF_ALL_PLACES
def test_ranks_of_mpiexec(mpiexec, case, tmp_path, monkeypatch, request):
    monkeypatch.setenv("MPIEXEC", mpiexec)
    if not shows_stacks(case):
        monkeypatch.setattr(sys, "executable", request.getfixturevalue("forked_python"))
    CASES[case](MPI, tmp_path)
