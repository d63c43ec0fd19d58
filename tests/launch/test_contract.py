"""The contract of places, for ranks of this host and for those of `mpiexec`."""

from __future__ import annotations

import sys

import pytest
from tests.launch.contract import CASES, ELASTIC_CASES, Place

LOCAL = Place("cpu", has_agents=False, result_mb=800)
MPI = Place("mpi", result_mb=800)
NEEDS_OWN_STACK = {"hangs]", "exits]", "SIGSEGV]"}
"""Cases that show stacks: those of a fork begin with frames of ours, and take long under load."""


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_ranks_of_this_host(case, tmp_path):
    case(LOCAL, tmp_path)


@pytest.mark.parametrize("case", ELASTIC_CASES.values(), ids=ELASTIC_CASES)
def test_elastic_ranks_of_this_host(case, tmp_path):
    case(LOCAL, tmp_path)


@pytest.mark.mpi
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_ranks_of_mpiexec(mpiexec, case, tmp_path, monkeypatch, request):
    monkeypatch.setenv("MPIEXEC", mpiexec)
    if not NEEDS_OWN_STACK & set(request.node.name.split("_")):
        python = request.getfixturevalue("forked_python")
        monkeypatch.setattr(sys, "executable", python)
    case(MPI, tmp_path)
