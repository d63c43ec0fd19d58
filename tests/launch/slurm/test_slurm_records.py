"""A recorded job on two nodes: one directory, one clock, one report."""

from __future__ import annotations

import json
import subprocess
import sys

SCRIPT = """
import torch
import torch.distributed as dist

import unisono
from unisono import train

dist.init_process_group("gloo")  # as scripts for torchrun do: its group is the world
comm = unisono.world()
assert comm.group is dist.group.WORLD
for step in range(5):
    comm.all_reduce(torch.ones(4))
    train.log(step=step, loss=float(comm.rank))
print("through")
"""


def test_a_job_on_two_nodes_is_recorded_on_one_clock(cluster, tmp_path):
    (tmp_path / "work.py").write_text(SCRIPT)
    words = ["--on", "slurm", "--nodes", "2", "--ranks", "2", "--record", "job", "work.py"]
    done = subprocess.run(
        [sys.executable, "-m", "unisono", "run", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "unisono: report in runs/job/report.html" in done.stderr
    run = tmp_path / "runs" / "job"
    parts = [json.loads((run / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert [part["status"] for part in parts] == ["done", "done"]
    mine, theirs = ([e for e in part["events"] if e["op"] == "all_reduce"] for part in parts)
    assert len(mine) == 5
    for one, other in zip(mine, theirs, strict=True):  # a collective is at one time on both
        assert one["t_start"] < other["t_end"] + 50_000_000
        assert other["t_start"] < one["t_end"] + 50_000_000
    lines = (run / "metrics.csv").read_text().splitlines()
    assert [line.split(",")[2] for line in lines[1:]] == ["0.5"] * 5
    assert 0 < float(lines[-1].split(",")[1]) < 100
