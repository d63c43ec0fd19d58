"""What exact and elastic steps cost: against DataParallel on shared memory, by number of shards.

    python benchmarks/elastic.py [--quick]

Elastic ranks are no world, so both cannot take turns in the same processes: jobs do, and a round
compares medians of neighbours. Deaths and joins are timed by the coordinator.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import time
from collections.abc import Callable

import torch
from harness import Row, markdown, publish
from torch import nn
from torch.nn.functional import cross_entropy

import unisono
from unisono.data_parallel import DataParallel
from unisono.launch.api import execute
from unisono.launch.elastic import supervisor
from unisono.launch.elastic.settings import Chaos
from unisono.launch.request import checked_request

RANKS, BATCH = 2, 256


class Attending(nn.Module):
    """A small transformer."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
        self.inner = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Classify sequences."""
        return self.out(self.inner(x).mean(1))


def workload(name: str) -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor, torch.Tensor]:
    """Return a model, its optimizer and data."""
    torch.manual_seed(0)
    if name == "MLP":
        layers = (nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU())
        model, shape = nn.Sequential(*layers, nn.Linear(512, 10)), (784,)
    elif name == "CNN":
        first = (nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        second = (nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten())
        model, shape = nn.Sequential(*first, *second, nn.Linear(2048, 10)), (3, 16, 16)
    else:
        model, shape = Attending(), (16, 64)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return model, optimizer, torch.randn(1024, *shape), torch.randint(0, 10, (1024,))


def data_parallel(name: str, steps: int) -> list[float]:
    """Return seconds of each step."""
    torch.set_num_threads(1)
    comm = unisono.world()
    model, optimizer, x, y = workload(name)
    wrapped = DataParallel(model)
    share = BATCH // comm.size
    times = []
    for step in range(steps):
        begin = time.perf_counter()
        at = step * BATCH % len(x) + comm.rank * share
        optimizer.zero_grad()
        cross_entropy(wrapped(x[at : at + share]), y[at : at + share]).backward()
        optimizer.step()
        times.append(time.perf_counter() - begin)
    return times


def elastic(name: str, shards: int, steps: int) -> list[float]:
    """Return seconds of each step."""
    model, optimizer, x, y = workload(name)
    times, begin = [], time.perf_counter()
    run = unisono.train.elastic(
        model, optimizer, (x, y), batch_size=BATCH, shards=shards, steps=steps
    )
    for step in run:
        step(lambda batch: cross_entropy(model(batch.x), batch.y))
        times.append(time.perf_counter() - begin)
        begin = time.perf_counter()
    return times


def median_step(results: list[list[float]]) -> float:
    """Return the median step of the slower rank, without the first ones."""
    return max(statistics.median(times[5:]) for times in results)


def compare(name: str, shards: tuple[int, ...], rounds: int, steps: int) -> list[Row]:
    """Let jobs take turns."""
    jobs: dict[str, Callable[[], float]] = {
        "DataParallel": lambda: median_step(
            list(unisono.run(data_parallel, name, steps, ranks=RANKS))
        )
    }
    for count in shards:
        jobs[f"S = {count}"] = functools.partial(
            lambda count: median_step(
                list(unisono.run(elastic, name, count, steps, ranks=RANKS, elastic=True))
            ),
            count,
        )
    found: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(rounds):
        for label, job in jobs.items():
            found[label].append(job())
    plain = found.pop("DataParallel")
    rows = []
    for label, times in found.items():
        ratio = statistics.median(a / b for a, b in zip(times, plain, strict=True))
        base = statistics.median(plain)
        target = 1.1 if label == f"S = {RANKS}" else None
        case = f"{name}, {RANKS} ranks, batch {BATCH}, {label}"
        rows.append(Row(case, ratio * base, base, "DataParallel", target))
    return rows


def deaths(kills: int, steps: int) -> str:
    """Kill ranks, and return how long deaths and joins took."""
    kept: list[supervisor.ElasticSupervisor] = []

    class Kept(supervisor.ElasticSupervisor):
        def __exit__(self, *error: object) -> None:
            kept.append(self)
            super().__exit__(*error)

    from unisono.launch.places import local

    local.ElasticSupervisor = Kept
    request = checked_request(
        elastic,
        ("CNN", 8, steps),
        {},
        on="cpu",
        ranks=3,
        nodes=None,
        timeout_s=None,
        max_restarts=None,
        logs=None,
        elastic=True,
        chaos=Chaos(seed=1, kills=kills),
    )
    step = statistics.median(execute(request)[0])
    hub = kept[0].hub
    return (
        f"{len(hub.recovered_s)} ranks killed or stopped: death to the next commit "
        f"{statistics.median(hub.recovered_s) * 1e3:.0f} ms (largest "
        f"{max(hub.recovered_s) * 1e3:.0f} ms; a step takes {step * 1e3:.0f} ms); arrival of a "
        f"newcomer to its first step {statistics.median(hub.joined_s) * 1e3:.0f} ms (largest "
        f"{max(hub.joined_s) * 1e3:.0f} ms)."
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few steps, nothing is written")
    quick = parser.parse_args().quick
    os.environ["OMP_NUM_THREADS"] = "1"
    rounds, steps = (1, 15) if quick else (3, 40)
    rows = [
        row
        for name in ("MLP", "CNN", "transformer")
        for row in compare(name, (2, 4) if quick else (2, 4, 8, 16), rounds, steps)
    ]
    told = deaths(*((2, 40) if quick else (10, 150)))
    publish("Elastic training", f"{markdown(rows)}\n\n{told}", write=not quick)
