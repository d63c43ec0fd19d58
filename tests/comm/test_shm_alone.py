"""The shm backend in a program that imports torch alone, and torch's own tools on its groups."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from unisono import torch_private

HAS_HOOKS = torch_private._FlightRecorderHook is not None

PROGRAM = """
import json, sys
import torch, torch.distributed as dist

dist.init_process_group("{backend}")
x = torch.full((3,), dist.get_rank() + 1.0)
dist.all_reduce(x)
assert x.tolist() == [3.0] * 3
{more}
if dist.get_rank() == 0:
    print(json.dumps(said))
dist.destroy_process_group()
"""

LOADED = "said = sorted(name for name in sys.modules if name.partition('.')[0] == 'unisono')"

RECORDED = """
dist.barrier()
dist.all_reduce(x, async_op=True).wait()
from torch._C import _distributed_c10d as c10d
said = json.loads(c10d._dump_fr_trace_json(backend="shm"))
"""

NAN = """
said = "passed"
try:
    dist.all_reduce(torch.tensor([float("nan")]))
except RuntimeError as error:
    said = "refused"
"""

DIFFERENT = """
from torch.nn.parallel import DistributedDataParallel
net = DistributedDataParallel(torch.nn.Linear(3, 2))
net(x[None]).sum().backward()
group = dist.new_group([0, 1])
dist.all_reduce(x, group=group)
said = x.tolist()
"""


def run(tmp_path, more, backend="shm", **variables):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM.format(backend=backend, more=more))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    job = subprocess.run(
        [*command, str(script)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
    )
    assert job.returncode == 0, job.stderr[-3000:]
    return json.loads(job.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize("backend", ["shm", "cpu:shm,cuda:nccl"])
def test_a_program_that_names_the_backend_loads_comm_and_nothing_above(tmp_path, backend):
    above = ("launch", "operators", "nn", "bayes", "data_parallel", "graph_parallel", "train")
    loaded = run(tmp_path, LOADED, backend)
    assert "unisono.comm.backends" in loaded
    assert not [name for name in loaded if name.split(".")[1:2] and name.split(".")[1] in above]


def test_debug_detail_of_torch_changes_no_result(tmp_path):
    assert run(tmp_path, DIFFERENT, TORCH_DISTRIBUTED_DEBUG="DETAIL") == [6.0] * 3


@pytest.mark.skipif(not HAS_HOOKS, reason=f"torch {torch.__version__} has no hooks around calls")
def test_the_flight_recorder_has_the_calls(tmp_path):
    record = run(tmp_path, RECORDED)
    names = [entry["profiling_name"] for entry in record["entries"]]
    assert names == ["shm:all_reduce", "shm:barrier", "shm:all_reduce"]
    assert record["pg_config"]["0"]["ranks"] == "[0, 1]"
    assert "entries" not in run(tmp_path, RECORDED, TORCH_FR_BUFFER_SIZE="0")


@pytest.mark.skipif(not HAS_HOOKS, reason=f"torch {torch.__version__} has no hooks around calls")
def test_torch_looks_for_nan(tmp_path):
    assert run(tmp_path, NAN, TORCH_DIST_NAN_CHECK="1") == "refused"
    assert run(tmp_path, NAN) == "passed"
