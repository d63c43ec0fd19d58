"""`detect` over environments as launchers really leave them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.environment import Environment, detect, expand_tasks_per_node
from unisono.errors import PlatformError

OURS = {
    "UNISONO_RUN_ID": "3f2a",
    "UNISONO_JOB_DIR": "/jobs/a",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "NODE_RANK": "1",
}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "2",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "n0",
    "MASTER_PORT": "29400",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM_STEP = {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "3",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
}
SLURM_BATCH_SCRIPT = {"SLURM_JOB_ID": "12", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
SLURM_PTY = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, Environment(kind="bare")),
        (
            OURS,
            Environment(
                kind="unisono",
                rank=3,
                size=4,
                local_rank=1,
                local_size=2,
                node=1,
                nodes=2,
                job_dir=Path("/jobs/a"),
            ),
        ),
        (
            TORCHRUN,
            Environment(
                kind="torchrun",
                rank=2,
                size=4,
                local_size=2,
                node=1,
                nodes=2,
                master=("n0", 29400),
            ),
        ),
        (
            OPENMPI,
            Environment(
                kind="openmpi", rank=5, size=8, local_rank=1, local_size=4, node=1, nodes=2
            ),
        ),
        (MPICH, Environment(kind="mpich", rank=1, size=2, local_rank=1, local_size=2)),
        (
            SLURM_STEP,
            Environment(kind="slurm", rank=6, size=7, local_size=1, node=3, nodes=4),
        ),
        (SLURM_BATCH_SCRIPT, Environment(kind="bare")),
        (SLURM_PTY, Environment(kind="bare")),
        ({**OURS, "UNISONO_DETECT": "0"}, Environment(kind="off", job_dir=Path("/jobs/a"))),
    ],
    ids=["bare", "ours", "torchrun", "openmpi", "mpich", "slurm", "batch", "pty", "off"],
)
def test_each_launcher_is_recognised(env, expected):
    assert detect(env) == expected


@pytest.mark.parametrize(
    ("env", "kind"),
    [
        ({**TORCHRUN, **OURS}, "unisono"),
        ({**OPENMPI, **TORCHRUN}, "torchrun"),
        ({**SLURM_STEP, **OPENMPI}, "openmpi"),
        ({**SLURM_STEP, "PMI_RANK": "6", "PMI_SIZE": "7"}, "slurm"),
        ({**SLURM_BATCH_SCRIPT, **MPICH}, "mpich"),
        ({**SLURM_STEP, **MPICH}, "mpich"),
    ],
)
def test_the_innermost_launcher_wins(env, kind):
    assert detect(env).kind == kind


def test_four_plain_variables_are_enough_for_a_world():
    plain = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "::1", "MASTER_PORT": "4000"}
    found = detect(plain)
    assert (found.kind, found.size, found.master) == ("torchrun", 2, ("::1", 4000))
    del plain["MASTER_PORT"]
    assert detect(plain).kind == "bare"


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({**TORCHRUN, "RANK": "4"}, ["RANK=4", "0 to 3"]),
        ({**TORCHRUN, "WORLD_SIZE": "many"}, ["WORLD_SIZE='many'", "UNISONO_DETECT=0"]),
        ({**TORCHRUN, "MASTER_PORT": "0"}, ["MASTER_PORT=0", "1 to 65535"]),
        ({"TORCHELASTIC_RUN_ID": "x"}, ["no variable RANK"]),
        ({**SLURM_STEP, "SLURM_STEP_TASKS_PER_NODE": "2(y3)"}, ["2(y3)"]),
    ],
)
def test_senseless_variables_are_named(env, words):
    with pytest.raises(PlatformError) as caught:
        detect(env)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 40)), min_size=1, max_size=8))
def test_tasks_per_node_are_expanded_as_slurm_shortens_them(runs):
    text = ",".join(f"{tasks}(x{times})" if times > 1 else f"{tasks}" for tasks, times in runs)
    assert expand_tasks_per_node(text) == [tasks for tasks, times in runs for _ in range(times)]


def test_only_the_mapping_is_read_and_torch_is_not_needed():
    code = (
        "import sys, types\n"
        "sys.modules['torch'] = None\n"
        "package = types.ModuleType('unisono.comm')\n"
        "import unisono; package.__path__ = [unisono.__path__[0] + '/comm']\n"
        "sys.modules['unisono.comm'] = package\n"
        "from unisono.environment import detect\n"
        "assert detect({'PMI_RANK': '1', 'PMI_SIZE': '2'}).rank == 1\n"
        "assert detect({}).kind == 'bare'\n"
    )
    env = {"PMI_RANK": "0", "PMI_SIZE": "3"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
