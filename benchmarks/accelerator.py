"""What a step makes the host of an accelerator do: wait for the device, copy to it.

    python benchmarks/accelerator.py [--quick]

Counted, not timed, by the simulated accelerator of `tests/accelerator` on two ranks, after five
steps to warm up: its kernels run at the speed of a CPU. Needs a checkout and a C++ compiler.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def steps(device: Any) -> dict[str, Callable[[], object]]:
    """Return one step of each kind, on `device`."""
    import numpy as np
    import torch
    import torch.nn.functional as F
    from torch import nn

    import unisono
    from unisono import bayes
    from unisono.data_parallel import DataParallel
    from unisono.graph_parallel import GraphPartition, GraphPlan, radius_graph
    from unisono.nn import split
    from unisono.topology import Partition

    comm = unisono.world().with_device(device)
    draw = torch.Generator().manual_seed(0)
    torch.manual_seed(0)

    def net() -> nn.Sequential:
        parts = nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3, 1, 1)
        return nn.Sequential(*parts).to(device)

    images = torch.rand(2, 3, 16, 16, generator=draw).to(device)
    model = DataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def data_parallel() -> None:
        optimizer.zero_grad()
        model(images).square().mean().backward()
        optimizer.step()

    rows = Partition([1, 1, 2, 1], comm=comm)
    cut = split(net(), rows)
    block = images[rows.local_slices(images.shape)]

    tokens = torch.rand(2, 4, 2, 8, generator=draw).to(device).transpose(1, 2)
    line = Partition([1, 1, 2, 1], comm=comm)

    class Attention(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    attention = split(Attention(), line)
    leaf = tokens.clone().requires_grad_()

    pos = (torch.rand(60, 3, generator=draw) * 3).to(device)
    edges = radius_graph(pos, 1.0).edge_index
    parts = GraphPartition.balanced(edges, len(pos), comm.size, order="morton", pos=pos)
    plan = GraphPlan(parts, edges, comm=comm)
    nodes = plan.scatter(pos).requires_grad_()

    bayes.manual_seed(0)
    tagi = bayes.Sequential(bayes.Linear(8, 16), bayes.ReLU(), bayes.Linear(16, 2))
    tagi.to_device(str(device))
    updater = bayes.OutputUpdater(tagi.device)
    x = torch.rand(4, 8, generator=draw).to(device)
    y = torch.rand(8, generator=draw).to(device)
    var = torch.full((8,), 0.1).to(device)
    arrays = [np.asarray(t.cpu()) for t in (x, y, var)]

    def learn(x: Any, y: Any, var: Any) -> None:
        tagi(x)
        updater.update(tagi.output_z_buffer, y, var, tagi.input_delta_z_buffer)
        tagi.backward()
        tagi.step()

    return {
        "DataParallel: forward, backward, SGD": data_parallel,
        "split convolutions: forward, backward": lambda: cut(block).square().mean().backward(),
        "split attention: forward, backward": lambda: attention(leaf).sum().backward(),
        "GraphPlan.message_pass: forward, backward": lambda: (
            plan.message_pass(nodes, lambda a, b, _: a * b).sum().backward()
        ),
        "TAGI step, tensors in": lambda: learn(x, y, var),
        "TAGI step, arrays in (it returns two)": lambda: learn(*arrays),
    }


ALLOWED = {"TAGI step, arrays in (it returns two)": 2}
"""Waits that the interface asks for."""


def count() -> dict[str, tuple[int, int]]:
    """Return, for each step, the waits of the host and the pageable bytes that it copied."""
    import torch

    import unisono

    simdev = import_module("simdev")
    found: dict[str, tuple[int, int]] = {}
    for name, step in steps(torch.device("sim", unisono.world().rank)).items():
        for _ in range(5):
            step()
        with simdev.counters() as counted:
            step()
        pageable = sum(n for kind, n in counted.bytes.items() if "pageable" in kind)
        found[name] = sum(counted.syncs.values()), pageable
    return found


def main() -> None:
    """Count, and print the table."""
    from harness import parser_for, publish

    import unisono

    args = parser_for(__doc__).parse_args()
    ranks = unisono.run(count, on="sim", ranks=2)
    lines = ["| step | waits of the host | pageable bytes copied | allowed waits | verdict |",
             "|---|---:|---:|---:|---|"]  # fmt: skip
    for name in ranks[0]:
        waits, copied = (max(rank[name][i] for rank in ranks) for i in (0, 1))
        allowed = ALLOWED.get(name, 0)
        verdict = "ok" if waits <= allowed else "MISSED"
        lines.append(f"| {name} | {waits} | {copied} | {allowed} | {verdict} |")
    text = "Two ranks on the simulated accelerator, the rank with the larger count.\n\n"
    publish("Host and accelerator", text + "\n".join(lines), write=not args.quick)


if __name__ == "__main__":
    if find_spec("simdev") is None:
        sys.path.insert(0, str(ROOT))
        build = import_module("tests.accelerator.build")
        if build.compiler() is None:
            sys.exit("the simulated accelerator needs a C++ compiler (CXX)")
        os.environ["PYTHONPATH"] = str(build.ensure())  # torch loads the device when it is imported
        os.execv(sys.executable, [sys.executable, *sys.argv])
    main()
