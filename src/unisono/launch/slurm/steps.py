"""The `srun` line of one attempt."""

from __future__ import annotations

import sys
from pathlib import Path

from unisono.launch.remote_plan import Plan


def srun_command(directory: Path, plan: Plan, attempt: int) -> list[str]:
    """Return the words that start a minder for each rank, in order of the nodes.

    `--cpus-per-task` is said again because newer `srun` do not take it from the job.
    """
    return [
        "srun",
        f"--nodes={plan.nodes}",
        f"--ntasks={plan.ranks}",
        f"--ntasks-per-node={plan.ranks_per_node}",
        f"--cpus-per-task={plan.cpus_per_rank}",
        "--distribution=block",
        "--kill-on-bad-exit=1",
        *plan.words,
        sys.executable,
        "-m",
        "unisono.launch.minder",
        str(directory),
        str(attempt),
    ]
