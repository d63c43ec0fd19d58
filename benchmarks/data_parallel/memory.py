"""Memory: do gradients exist once, and how large are the buckets?

    python benchmarks/data_parallel/memory.py [--quick]

Counted are torch's own allocations, so nothing depends on the machine: what gradients and buckets
hold all the time, and the peak of what comes and goes within a step, as the profiler sees it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from harness import parser_for, peak_bytes, publish
from torch import nn

import unisono
from unisono.comm import Communicator
from unisono.data_parallel import DataParallel, DataParallelOptimizer

WIDTH = 2048


def measure(way: str) -> tuple[int, int, int]:
    """Return peak bytes of a way beyond the model, bytes of gradients, and of buckets."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    model: nn.Module = net
    buckets: list[torch.Tensor] = []
    if way != "plain":
        comm = Communicator.of(torch.distributed.new_group(backend=way))
        optimizer = DataParallelOptimizer(optimizer)
        model = DataParallel(net, comm, optimizer, blocking_parameter_updates=True)
        buckets = [bucket.flat for bucket in model._running().buckets]
    x = torch.randn(4, WIDTH)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        model(x).square().mean().backward()
        optimizer.step()

    for _ in range(3):
        step()
    peak = peak_bytes(step)
    places = {x.untyped_storage().data_ptr(): x for x in buckets}
    for p in net.parameters():
        if p.grad is not None:
            places[p.grad.untyped_storage().data_ptr()] = p.grad
    shared = sum(x.numel() * x.element_size() for x in buckets)
    # A bucket in shared memory is part of a larger storage: count what is this rank's.
    lasting = shared or sum(x.untyped_storage().nbytes() for x in places.values())
    if buckets and len(places) > len(buckets):
        raise RuntimeError("a gradient lies outside the buckets")
    gradients = sum(p.numel() * p.element_size() for p in net.parameters())
    return peak + lasting, gradients, shared


def main() -> None:
    """Measure the three ways and print the table."""
    quick = parser_for(__doc__).parse_args().quick
    os.environ["OMP_NUM_THREADS"] = "1"
    found = {way: unisono.run(measure, way, ranks=2)[0] for way in ("plain", "gloo", "shm")}
    lines = [
        "| case | extra over a plain loop | buckets | gradients | ratio | target | verdict |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for way in ("gloo", "shm"):
        total, gradients, buckets = found[way]
        extra, mb = total - found["plain"][0], 2**20
        for name, ratio, target in (
            ("extra bytes", extra / gradients, 0.01),
            ("bucket bytes", round(buckets / gradients, 3), 1.0),
        ):
            verdict = "ok" if ratio <= target else "MISSED"
            lines.append(
                f"| {name} / gradient bytes, {way} | {extra / mb:.1f} MB | {buckets / mb:.1f} MB | "
                f"{gradients / mb:.1f} MB | {ratio:.3f} | <= {target} | {verdict} |"
            )
    publish("Data parallel: memory", "\n".join(lines), write=not quick)


if __name__ == "__main__":
    main()
