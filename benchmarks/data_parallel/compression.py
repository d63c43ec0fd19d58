"""Compressed gradients over a slow link: bfloat16 against float32 at 100 Mbit/s.

    python benchmarks/data_parallel/compression.py [--quick]

The link is simulated: after each collective a rank waits until its bytes would have passed, the
same for both sides. Buckets go one after the other, as on a real link.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from harness import Row, markdown, publish
from workloads import MODELS, backend_group, take_turns, training_step

import unisono
from unisono.comm import Communicator
from unisono.comm.perform import Pending
from unisono.data_parallel import DataParallel, DataParallelOptimizer

BYTES_PER_S = 100e6 / 8


class SlowLink(Communicator):
    """A communicator whose collectives take at least as long as 100 Mbit/s allow."""

    free_at = 0.0

    def all_reduce_(self, x: torch.Tensor, op: str = "sum", **options: Any) -> Any:
        """See `Communicator`: a ring moves 2 (P - 1) / P of the tensor each way."""
        nbytes = x.numel() * x.element_size() * 2 * (self.size - 1) / self.size
        return self._delayed(super().all_reduce_(x, op, **options), nbytes)

    def all_to_all(self, x: Any, *sizes: Any, **options: Any) -> Any:
        """See `Communicator`: all but the own block travels."""
        nbytes = x.numel() * x.element_size() * (self.size - 1) / self.size
        return self._delayed(super().all_to_all(x, *sizes, **options), nbytes)

    def all_gather(self, x: Any, *args: Any, **options: Any) -> Any:
        """See `Communicator`: the own block goes to all others."""
        nbytes = x.numel() * x.element_size() * (self.size - 1)
        return self._delayed(super().all_gather(x, *args, **options), nbytes)

    def _delayed(self, result: Any, nbytes: float) -> Any:
        due = max(time.perf_counter(), SlowLink.free_at) + nbytes / BYTES_PER_S
        SlowLink.free_at = due

        def complete(timeout_s: float | None) -> Any:
            value = result.wait(timeout_s) if isinstance(result, Pending) else result
            time.sleep(max(0.0, due - time.perf_counter()))
            return value

        return Pending(complete, lambda: time.perf_counter() >= due and _done(result))


def _done(result: Any) -> bool:
    return result.done() if isinstance(result, Pending) else True


def measure(quick: bool) -> list[Row]:
    """Measure both on the ranks of the world."""
    torch.set_num_threads(1)
    gloo = backend_group("gloo")
    slow = SlowLink.of(gloo.group)
    steps = {}
    for compression in (None, "bf16", "fp16"):
        torch.manual_seed(0)
        make, shape = MODELS["MLP"]
        net = make()
        optimizer = DataParallelOptimizer(torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9))
        model = DataParallel(net, slow, optimizer, True, compression=compression)
        steps[str(compression)] = training_step(model, optimizer, shape)
    rounds, warm_up, count = (3, 1, 2) if quick else (7, 3, 8)
    found = take_turns(gloo, steps, rounds=rounds, warm_up=warm_up, count=count)
    plain = found["None"]
    return [
        Row(
            f"MLP, 100 Mbit/s, 2 ranks: {name}",
            found[name].ratio(plain) * plain.median,
            plain.median,
            "uncompressed",
            0.65,
            f"rounds {found[name].spread(plain)}",
        )
        for name in ("bf16", "fp16")
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few steps, nothing is written")
    quick = parser.parse_args().quick
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = unisono.run(measure, quick, ranks=2)[0]
    publish("Data parallel: compression", markdown(rows), write=not quick)
