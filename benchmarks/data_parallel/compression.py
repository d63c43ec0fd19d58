"""Compressed gradients over a slow link: bfloat16 against float32 at 100 Mbit/s.

    python benchmarks/data_parallel/compression.py [--quick]

The link is simulated: what is sent arrives when its bytes would have passed, the same for both
sides. Buckets go one after the other, as on a real link.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import slow_link
import torch
from harness import Row, markdown, parser_for, publish, take_turns
from workloads import MODELS, backend_group, training_step

import unisono
from unisono.data_parallel import DataParallel, DataParallelOptimizer


def measure(quick: bool) -> list[Row]:
    """Measure all three on the ranks of the world."""
    torch.set_num_threads(1)
    slow_link.link = slow_link.Link(latency_s=0.0, bytes_per_s=100e6 / 8)
    gloo = backend_group("gloo")
    slow = slow_link.TwoNodes.of(gloo.group)
    steps = {}
    for compression in (None, "bf16", "fp16"):
        torch.manual_seed(0)
        make, shape = MODELS["MLP"]
        net = make()
        optimizer = DataParallelOptimizer(torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9))
        model = DataParallel(net, slow, optimizer, True, compression=compression)
        steps[str(compression)] = training_step(model, optimizer, shape)
    rounds, warm_up, repeats = (3, 1, 2) if quick else (7, 3, 8)
    found = take_turns(gloo, steps, rounds=rounds, warm_up=warm_up, repeats=repeats)
    if slow_link.link.bytes == 0:
        raise RuntimeError("nothing has passed the link")
    return [
        found[name].row(f"MLP, 100 Mbit/s, 2 ranks: {name}", found["None"], "uncompressed", 0.65)
        for name in ("bf16", "fp16")
    ]


if __name__ == "__main__":
    quick = parser_for(__doc__).parse_args().quick
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = unisono.run(measure, quick, ranks=2)[0]
    publish("Data parallel: compression", markdown(rows), write=not quick)
