"""The contract of places, for ranks of this host and for those of `mpiexec`."""

from __future__ import annotations

import sys

import pytest
from tests.launch.contract import CASES, Place

LOCAL = Place("cpu", has_agents=False)
MPI = Place("mpi")
ASKS_FOR_STACKS = {"hangs]", "exits]"}
"""In a fraction of a second, which is too little for a fork of a large process under load."""


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_ranks_of_this_host(case, tmp_path):
    case(LOCAL, tmp_path)


@pytest.mark.mpi
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_ranks_of_mpiexec(mpiexec, case, tmp_path, monkeypatch, request):
    monkeypatch.setenv("MPIEXEC", mpiexec)
    if not ASKS_FOR_STACKS & set(request.node.name.split("_")):
        python = request.getfixturevalue("forked_python")
        monkeypatch.setattr(sys, "executable", python)
    case(MPI, tmp_path)
