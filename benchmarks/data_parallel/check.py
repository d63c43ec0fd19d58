"""What check mode adds to a training step: the MLP over shm with two ranks.

python benchmarks/data_parallel/check.py [--quick]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from harness import Row, markdown, parser_for, publish, take_turns
from workloads import Step, backend_group, variant

import unisono
from unisono.comm import check


def checked(step: Step) -> Step:
    """Return the step in check mode."""

    def run() -> None:
        with check():
            step()

    return run


def measure(quick: bool) -> list[Row]:
    """Compare a step in check mode with the same step without."""
    torch.set_num_threads(1)
    shm = backend_group("shm")
    steps = {
        "check mode": checked(variant("blocking", "MLP", shm)),
        "plain": variant("blocking", "MLP", shm),
    }
    rounds, warm_up, count = (5, 5, 20) if quick else (25, 50, 8)
    found = take_turns(shm, steps, rounds=rounds, warm_up=warm_up, repeats=count)
    case = "MLP, 2 ranks, shm: check mode"
    return [found["check mode"].row(case, found["plain"], "the same step", 1.10)]


if __name__ == "__main__":
    quick = parser_for(__doc__).parse_args().quick
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = unisono.run(measure, quick, ranks=2)[0]
    publish("Data parallel: check mode", markdown(rows), write=not quick)
