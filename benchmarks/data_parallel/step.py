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


SHARE = {"MLP": 1.0, "CNN": 0.5, "TransformerEncoder": 0.1}
"""Steps of a block, for models whose steps take longer."""


def measure(quick: bool, steps_a_block: int, models: list[str]) -> list[Row]:
    """Measure all variants of the models on the ranks of the world."""
    torch.set_num_threads(1)
    gloo, shm = backend_group("gloo"), backend_group("shm")
    rows: list[Row] = []
    for model in models:
        steps = {
            "DDP, gloo": variant("ddp", model, gloo),
            "blocking, gloo": variant("blocking", model, gloo),
            "non-blocking, gloo": variant("non-blocking", model, gloo),
            "blocking, shm": variant("blocking", model, shm),
            "non-blocking, shm": variant("non-blocking", model, shm),
            "no communication": variant("alone", model, None),
        }
        count = max(2, round(steps_a_block * SHARE[model]))
        rounds, warm_up = (5, 2) if quick else (9, max(2, count // 4))
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
    parser.add_argument("--steps", type=int, help="steps of an MLP's block (200; quick: 20)")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    options = parser.parse_args()
    quick, steps = options.quick, options.steps or (20 if options.quick else 200)
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = unisono.run(measure, quick, steps, options.models, ranks=2)[0]
    blocks = ", ".join(f"{model} {round(steps * SHARE[model])}" for model in options.models)
    text = (
        f"Nine rounds; in each, every variant in turn. Steps a turn: {blocks}.\n\n{markdown(rows)}"
    )
    publish("Data parallel: a step", text, write=not quick)
