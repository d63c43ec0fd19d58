"""How long a job on two nodes takes, against `srun` with nothing but `import torch`.

    python benchmarks/launch_slurm.py [--quick]

Uses the cluster that `sinfo` finds; in a checkout, as root and with SLURM installed, it starts one.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from harness import Row, markdown, parser_for, publish

import unisono
from unisono.errors import PlatformError
from unisono.launch.places.slurm.cluster import partitions

CLUSTER = Path(__file__).parents[1] / "tests" / "cluster" / "slurm_cluster.py"
QUIET = unisono.Logs(console="none")


def one_all_reduce() -> None:
    unisono.world().all_reduce(torch.ones(1))


def ours() -> None:
    unisono.run(one_all_reduce, on="slurm", nodes=2, logs=QUIET)


def reference() -> None:
    words = ["srun", "--nodes=2", "--ntasks=2", sys.executable, "-c", "import torch"]
    subprocess.run(words, check=True, capture_output=True)


@contextmanager
def cluster() -> Iterator[None]:
    """Use a cluster that is there, or one of our own."""
    try:
        partitions(timeout_s=10.0)
    except PlatformError as error:
        if not CLUSTER.exists():
            sys.exit(f"this benchmark needs a SLURM cluster: {error}")
    else:
        yield
        return
    spec = importlib.util.spec_from_file_location("slurm_cluster", CLUSTER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if (why := module.why_not()) is not None:
        sys.exit(f"this benchmark needs a SLURM cluster: {why}")
    with module.Cluster(2, 2) as own:
        os.environ |= own.variables
        yield


def timed(function: Callable[[], None]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def main() -> None:
    options = parser_for(__doc__).parse_args()
    rounds = 1 if options.quick else 5
    folder = tempfile.TemporaryDirectory(prefix="unisono-bench-")
    with cluster(), folder:
        os.chdir(folder.name)
        pairs = [(timed(ours), timed(reference)) for _ in range(rounds)]
    mine, theirs = (statistics.median(side) for side in zip(*pairs, strict=True))
    rows = [Row("launch_slurm: 2 nodes", mine, theirs, "srun, import torch", 2.0)]
    publish("Launching on SLURM", markdown(rows), write=not options.quick)


if __name__ == "__main__":
    main()
