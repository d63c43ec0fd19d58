"""The contract of places, for ranks of this host and for those of `mpiexec`."""

from __future__ import annotations

import pytest
from tests.launch.contract import CASES, Place

LOCAL = Place("cpu", has_agents=False)
MPI = Place("mpi")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_ranks_of_this_host(case, tmp_path):
    case(LOCAL, tmp_path)


@pytest.mark.mpi
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_ranks_of_mpiexec(mpiexec, case, tmp_path, monkeypatch):
    monkeypatch.setenv("MPIEXEC", mpiexec)
    case(MPI, tmp_path)
