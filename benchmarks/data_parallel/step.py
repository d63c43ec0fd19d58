"""A training step against torch's DDP over gloo: 2 ranks, one thread each, SGD with momentum.

python benchmarks/data_parallel/step.py [--quick]
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from harness import Row, markdown, publish
from workloads import MODELS, backend_group, take_turns, variant

import unisono

TARGETS = {
    ("MLP", "blocking", "gloo"): 1.00,
    ("MLP", "non-blocking", "gloo"): 0.95,
    ("MLP", "blocking", "shm"): 0.60,
    ("CNN", "blocking", "gloo"): 1.00,
    ("CNN", "blocking", "shm"): 0.85,
    ("TransformerEncoder", "blocking", "gloo"): 1.00,
    ("TransformerEncoder", "blocking", "shm"): 0.85,
}
"""Largest ratios to DDP over gloo."""


def measure(quick: bool) -> list[Row]:
    """Measure all variants of all models on the ranks of the world."""
    torch.set_num_threads(1)
    gloo, shm = backend_group("gloo"), backend_group("shm")
    rows: list[Row] = []
    for model in MODELS:
        steps = {
            "DDP, gloo": variant("ddp", model, gloo),
            "blocking, gloo": variant("blocking", model, gloo),
            "non-blocking, gloo": variant("non-blocking", model, gloo),
            "blocking, shm": variant("blocking", model, shm),
            "non-blocking, shm": variant("non-blocking", model, shm),
            "no communication": variant("alone", model, None),
        }
        rounds, warm_up, count = (5, 5, 20) if quick else (9, 50, 200)
        found = take_turns(shm, steps, rounds=rounds, warm_up=warm_up, count=count)
        reference = found["DDP, gloo"]
        for name, timing in found.items():
            if name == "DDP, gloo":
                continue
            mode, _, backend = name.partition(", ")
            ratio = timing.ratio(reference)
            rows.append(
                Row(
                    f"{model}: {name}",
                    ratio * reference.median,
                    reference.median,
                    "DDP over gloo",
                    TARGETS.get((model, mode, backend)),
                    f"rounds {timing.spread(reference)}",
                )
            )
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few steps, nothing is written")
    quick = parser.parse_args().quick
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = unisono.run(measure, quick, ranks=2)[0]
    publish("Data parallel: a step", markdown(rows), write=not quick)
