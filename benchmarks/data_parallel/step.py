"""A training step against torch's DDP over gloo: 2 ranks, one thread each, SGD with momentum.

python benchmarks/data_parallel/step.py [--quick]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from harness import Row, markdown, parser_for, publish, take_turns
from workloads import MODELS, Step, backend_group, variant

import unisono
from unisono.comm import Communicator

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


ROUNDS = 25
"""Variants take short turns: what disturbs the machine for a second then disturbs all of them."""


def steps_a_turn(steps: int) -> int:
    """Return how many steps make a turn."""
    return max(2, round(steps / ROUNDS))


def meeting(step: Step, comm: Communicator) -> Step:
    """Return the step with a barrier at its end: the slower rank of each step counts, as it does
    wherever gradients are averaged. No average can be faster.
    """

    def met() -> None:
        step()
        comm.barrier()

    return met


def measure(quick: bool, total: int, models: list[str]) -> list[Row]:
    """Measure all variants of the models on the ranks of the world."""
    torch.set_num_threads(1)
    gloo, shm = backend_group("gloo"), backend_group("shm")
    rows: list[Row] = []
    for model in models:
        steps = {
            "DDP, gloo": variant("ddp", model, gloo),
            "compiled DDP, gloo": variant("compiled ddp", model, gloo),
            "compiled DDP, shm": variant("compiled ddp", model, shm),
            "blocking, gloo": variant("blocking", model, gloo),
            "non-blocking, gloo": variant("non-blocking", model, gloo),
            "blocking, shm": variant("blocking", model, shm),
            "non-blocking, shm": variant("non-blocking", model, shm),
            "no communication": variant("alone", model, None),
            "no communication, but ranks meet": meeting(variant("alone", model, None), shm),
        }
        count = steps_a_turn(total)
        rounds, warm_up = (5, 2) if quick else (ROUNDS, round(total / 4))
        found = take_turns(shm, steps, rounds=rounds, warm_up=warm_up, repeats=count)
        reference = found["DDP, gloo"]
        for name, timing in found.items():
            if name == "DDP, gloo":
                continue
            mode, _, backend = name.partition(", ")
            target = TARGETS.get((model, mode, backend))
            rows.append(timing.row(f"{model}: {name}", reference, "DDP over gloo", target))
    return rows


if __name__ == "__main__":
    parser = parser_for(__doc__)
    parser.add_argument("--steps", type=int, help="steps of each variant (200; quick: 50)")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    options = parser.parse_args()
    quick, steps = options.quick, options.steps or (50 if options.quick else 200)
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = unisono.run(measure, quick, steps, options.models, ranks=2)[0]
    text = (
        f"{ROUNDS} rounds; in each, every variant in turn, {steps_a_turn(steps)} steps a turn.\n\n"
        f"{markdown(rows)}"
    )
    publish("Data parallel: a step", text, write=not quick)
