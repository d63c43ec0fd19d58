"""The contract of places, for jobs of SLURM."""

from __future__ import annotations

import pytest
from tests.launch.contract import CASES, ELASTIC_CASES, HOSTILE, Place
from tests.launch.test_contract import NEEDS_OWN_STACK

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(240)]
# A batch script cannot have a line break in the name of a file; that is refused.
SLURM = Place("slurm", hostile=HOSTILE.replace("\n", ""), has_job=True, options={"n_nodes": 2})


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_ranks_of_a_job(cluster, case, tmp_path, request):
    if not NEEDS_OWN_STACK & set(request.node.name.split("_")):
        request.getfixturevalue("forked_jobs")
    case(SLURM, tmp_path)


@pytest.mark.parametrize("case", ELASTIC_CASES.values(), ids=ELASTIC_CASES)
def test_elastic_ranks_of_a_job(cluster, case, tmp_path, request):
    if not NEEDS_OWN_STACK & set(request.node.name.split("_")):
        request.getfixturevalue("forked_jobs")
    case(SLURM, tmp_path)
