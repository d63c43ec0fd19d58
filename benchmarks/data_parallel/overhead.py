"""What the wrapper adds to a step: over shm with two ranks, and in a world of one.

python benchmarks/data_parallel/overhead.py [--quick]
"""

from __future__ import annotations

import os
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from harness import Row, markdown, parser_for, publish, take_turns
from workloads import MODELS, backend_group, variant

import unisono
from unisono.comm import world


def communication(quick: bool) -> list[Row]:
    """Compare what communication adds to a step: ours over shm, DDP's over gloo."""
    torch.set_num_threads(1)
    gloo, shm = backend_group("gloo"), backend_group("shm")
    steps = {
        "ddp": variant("ddp", "MLP", gloo),
        "ours": variant("blocking", "MLP", shm),
        "alone": variant("alone", "MLP", None),
    }
    rounds, warm_up, count = (5, 5, 20) if quick else (25, 50, 8)
    found = take_turns(shm, steps, rounds=rounds, warm_up=warm_up, repeats=count)
    ours, theirs = (
        statistics.median(
            a - b for a, b in zip(found[name].rounds, found["alone"].rounds, strict=True)
        )
        for name in ("ours", "ddp")
    )
    case = "MLP, 2 ranks: added by communication, shm"
    return [Row(case, ours, theirs, "DDP over gloo", 0.40)]


def alone(quick: bool) -> list[Row]:
    """Compare a world of one with a plain loop."""
    torch.set_num_threads(1)
    rows: list[Row] = []
    for model in MODELS:
        kinds = ("alone", "blocking", "non-blocking")
        steps = {kind: variant(kind, model, None) for kind in kinds}
        rounds, warm_up, count = (5, 5, 20) if quick else (25, 50, 8)
        found = take_turns(world(), steps, rounds=rounds, warm_up=warm_up, repeats=count)
        for kind in kinds[1:]:
            case = f"{model}, world of one: {kind}"
            rows.append(found[kind].row(case, found["alone"], "plain loop", 1.03))
    return rows


if __name__ == "__main__":
    quick = parser_for(__doc__).parse_args().quick
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = unisono.run(communication, quick, ranks=2)[0] + unisono.run(alone, quick, ranks=1)[0]
    publish("Data parallel: overhead", markdown(rows), write=not quick)
