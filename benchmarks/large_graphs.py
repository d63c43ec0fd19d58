"""Plans of large graphs: against a sort of the edges, and how costs grow with nodes and parts.

    python benchmarks/large_graphs.py [--quick]

A plan of 1M nodes and 20M random edges is made on each of two ranks, beside `np.sort` of the same
edges. Growth is that of one part of a lattice, computed as its rank would, with what other ranks
would answer made up: it needs no ranks, so parts go up to 4,096.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from harness import Figure, Row, figure_table, markdown, parser_for, publish, take_turns
from torch import Tensor

import unisono
from unisono import graph_parallel as gp
from unisono.comm import Communicator

FEATURES = 64
"""Columns of the rows that an exchange moves, float32."""


def peak_memory() -> int:
    """Return the most bytes this process has held since it last asked, and begin anew."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return 1024 * int(peak.split()[1])


def build(nodes: int, edges: int, rounds: int) -> tuple[Row, Figure]:
    """Return the time of a plan, and its memory, in units of the edges'."""
    torch.set_num_threads(1)
    comm = unisono.world()
    edge_index = torch.randint(0, nodes, (2, edges), generator=torch.Generator().manual_seed(0))
    part = gp.GraphPartition.contiguous(nodes, comm.size)
    peak_memory()
    before = peak_memory()
    gp.GraphPlan(part, edge_index, comm=comm)
    memory = comm.all_reduce(torch.tensor((peak_memory() - before) / edge_index.nbytes), "max")
    runs = {
        "plan": lambda: gp.GraphPlan(part, edge_index, comm=comm),
        "sort": lambda: np.sort(edge_index.numpy()),
    }
    timings = take_turns(comm, runs, rounds=rounds, warm_up=1)
    case = f"plan of {nodes:,} nodes, {edges:,} edges, 2 ranks"
    return (
        timings["plan"].row(case, timings["sort"], "np.sort of the edges", 1.5),
        Figure(f"{case}: memory / that of the edges", float(memory), 2.5, "at its peak, per rank"),
    )


class OneOfMany:
    """A rank without the others, which answer as they would where all parts are alike."""

    device = torch.device("cpu")

    def __init__(self, rank: int, size: int, own: int, first: int) -> None:
        self.rank, self.size = rank, size
        self._own, self._first = own, first

    def all_gather_ints(self, numbers: Sequence[int]) -> list[Sequence[int]]:
        """Return the same from every rank."""
        return [numbers] * self.size

    def all_to_all(self, x: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        """Return how many rows each asks for, which is what it is asked for; then which ones."""
        if list(sends) == list(receives) == [1] * self.size:
            return x
        return torch.arange(sum(receives)) % self._own + self._first


def offsets(reach: int) -> Tensor:
    """Return the steps to all places of a lattice within a cube, except to the place itself."""
    steps = torch.cartesian_prod(*[torch.arange(-reach, reach + 1)] * 3)
    return steps[steps.abs().sum(1) > 0]


@dataclass(frozen=True)
class Point:
    """Costs of one part of one graph, times in seconds."""

    side: int
    reach: int
    parts: int
    partition: float
    plan: float
    exchange: float
    """Its own share: rows taken out for others, and gradients added when they come home."""
    halo: int
    peers: int

    @property
    def nodes(self) -> int:
        """Of the whole graph."""
        return self.side**3

    @property
    def edges(self) -> int:
        """Of the whole graph."""
        return self.nodes * ((2 * self.reach + 1) ** 3 - 1)

    def line(self) -> str:
        """Return the row of the table."""
        times = " | ".join(f"{1e3 * t:.2f} ms" for t in (self.partition, self.plan, self.exchange))
        return (
            f"| {self.nodes:,} | {self.edges:,} | {self.parts:,} | {times} "
            f"| {self.halo:,} | {self.peers} |"
        )


def point(side: int, reach: int, parts: int, rounds: int) -> Point:
    """Measure one part, in the middle, of a periodic lattice of `side` ** 3 nodes."""
    places = torch.cartesian_prod(*[torch.arange(side)] * 3)
    seconds, part = best(lambda: gp.GraphPartition.morton(places.float(), parts), rounds)
    rank = parts // 2
    own = part.nodes_of(rank)
    near = (places[own][:, None] + offsets(reach)) % side
    source = (near * torch.tensor([side * side, side, 1])).sum(2).flatten()
    edge_index = torch.stack([source, own.repeat_interleave(len(offsets(reach)))])
    comm = cast("Communicator", OneOfMany(rank, parts, len(own), part.offsets[rank]))
    building, plan = best(lambda: gp.GraphPlan(part, edge_index, edges="local", comm=comm), rounds)
    rows = torch.randn(plan.num_local, FEATURES)
    moving, _ = best(
        lambda: torch.zeros_like(rows).index_add_(0, plan.send_index, rows[plan.send_index]), rounds
    )
    peers = sum(size > 0 for size in plan.recv_sizes)
    return Point(side, reach, parts, seconds, building, moving, plan.num_halo, peers)


def best(run: Callable[[], Any], rounds: int) -> tuple[float, Any]:
    """Return the shortest of some times, and what came out."""
    times, out = [], run()
    for _ in range(rounds):
        start = time.perf_counter()
        out = run()
        times.append(time.perf_counter() - start)
    return min(times), out


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """Return n of the y ~ x ** n that is nearest, in logarithms."""
    return float(np.polyfit([math.log(a) for a in x], [math.log(b) for b in y], 1)[0])


def growth(quick: bool) -> tuple[list[Point], list[Figure]]:
    """Costs against nodes, edges and parts, one after the other, and how they grow."""
    rounds = 1 if quick else 5
    side = 24 if quick else 64
    series = {
        "nodes": [(s, 1, 8) for s in ((16, 24) if quick else (32, 48, 64, 96))],
        "edges": [(side // 2, reach, 8) for reach in ((1, 2) if quick else (1, 2, 3))],
        "parts": [(side, 1, 1 << p) for p in ((1, 6) if quick else (1, 3, 6, 9, 12))],
    }
    limits = {  # of the partition, the plan, the exchange, the rows of the halo
        "nodes": (1.25, 1.25, 1.0, 0.8),
        "edges": (0.1, 1.25, 0.8, 0.8),
        "parts": (0.1, 0.1, -0.3, -0.35),
    }
    points: list[Point] = []
    figures: list[Figure] = []
    for name, graphs in series.items():
        found = [point(*graph, rounds) for graph in graphs]
        points += found
        over = [getattr(p, name) for p in found]
        for what, most in zip(("partition", "plan", "exchange", "halo"), limits[name], strict=True):
            power = exponent(over, [getattr(p, what) for p in found])
            case = f"growth of one part's {what} with {name}: exponent"
            figures.append(Figure(case, power, most, f"{min(over):,} to {max(over):,}"))
    return points, figures


def main() -> None:
    """Run all cases and write the tables."""
    quick = parser_for(__doc__).parse_args().quick
    torch.set_num_threads(1)
    size = (100_000, 2_000_000, 3) if quick else (1_000_000, 20_000_000, 7)
    row, memory = unisono.run(build, *size, ranks=2)[0]
    points, figures = growth(quick)
    heading = [
        "| nodes | edges | parts | partition | plan of a part | its exchange | halo rows | peers |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    tables = [
        markdown([row]),
        figure_table([memory, *figures]),
        "\n".join([*heading, *(p.line() for p in points)]),
    ]
    publish("Large graphs", "\n\n".join(tables), write=not quick)


if __name__ == "__main__":
    main()
