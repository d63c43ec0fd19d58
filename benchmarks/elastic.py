"""What exact and elastic steps cost: against DataParallel on shared memory, by number of shards.

    python benchmarks/elastic.py [--quick]

Elastic ranks are no world, so both cannot take turns in the same processes: jobs do, and a round
compares medians of neighbours.
"""

from __future__ import annotations

import functools
import hashlib
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
from harness import Row, Timing, markdown, parser_for, publish
from torch import nn
from torch.nn.functional import cross_entropy

import unisono
from unisono.data_parallel import DataParallel

RANKS, BATCH = 2, 256
MODELS = ("MLP", "CNN", "transformer", "LSTM")


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


class Recurrent(nn.Module):
    """A small LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(64, 64, 2, batch_first=True, dropout=0.2)
        self.out = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Classify sequences."""
        return self.out(self.inner(x)[0][:, -1])


def workload(name: str) -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor, torch.Tensor]:
    """Return a model, its optimizer and data."""
    torch.manual_seed(0)
    if name == "MLP":
        layers = (nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU())
        model, shape = nn.Sequential(*layers, nn.Linear(512, 10)), (784,)
    elif name == "CNN":
        first = (nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
        second = (nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1))
        model, shape = nn.Sequential(*first, *second, nn.Linear(2048, 10)), (3, 16, 16)
    else:
        model, shape = (Attending() if name == "transformer" else Recurrent()), (16, 64)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return model, optimizer, torch.randn(1024, *shape), torch.randint(0, 10, (1024,))


def data_parallel(name: str, steps: int) -> list[float]:
    """Return seconds of each step."""
    torch.set_num_threads(1)
    comm = unisono.world()
    model, optimizer, x, y = workload(name)
    wrapped = DataParallel(model)
    share = BATCH // comm.size
    times, generator, order = [], torch.Generator().manual_seed(0), torch.empty(0)
    for step in range(steps):
        begin = time.perf_counter()
        if (at := step * BATCH % len(x)) == 0:  # a new order for each epoch, as elastic has it
            order = torch.randperm(len(x), generator=generator)
        mine = order[at + comm.rank * share : at + (comm.rank + 1) * share]
        optimizer.zero_grad()
        cross_entropy(wrapped(x[mine]), y[mine]).backward()
        optimizer.step()
        times.append(time.perf_counter() - begin)
    return times


def elastic(name: str, shards: int, steps: int) -> list[float]:
    """Return seconds of each step."""
    return trained(name, shards, steps)[0]


def trained(name: str, shards: int, steps: int) -> tuple[list[float], str]:
    """Return seconds of each step, and the hash of weights, buffers and optimizer state."""
    model, optimizer, x, y = workload(name)
    times, begin = [], time.perf_counter()
    run = unisono.train.elastic(
        model, optimizer, (x, y), batch_size=BATCH, shards=shards, steps=steps
    )
    for step in run:
        step(lambda batch: cross_entropy(model(batch.x), batch.y))
        times.append(time.perf_counter() - begin)
        begin = time.perf_counter()
    found = hashlib.sha256()
    states = [value for p in model.parameters() for _, value in sorted(optimizer.state[p].items())]
    for tensor in [*model.state_dict().values(), *states]:
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return times, found.hexdigest()


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
    plain = Timing(found.pop("DataParallel"))
    rows = []
    for label, times in found.items():
        target = 1.1 if label == f"S = {RANKS}" else None
        case = f"{name}, {RANKS} ranks, batch {BATCH}, {label}"
        rows.append(Timing(times).row(case, plain, "DataParallel", target))
    return rows


def main() -> int:
    """Measure what the command line asks for."""
    parser = parser_for(__doc__)
    parser.add_argument("--model", action="append", choices=MODELS, help="only this one")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    rounds, steps = (1, 15) if options.quick else (3, 40)
    rows = [
        row
        for name in options.model or MODELS[:3]
        for row in compare(name, (2, 4) if options.quick else (2, 4, 8, 16), rounds, steps)
    ]
    publish("Elastic training", markdown(rows), write=not (options.quick or options.model))
    return 0


if __name__ == "__main__":
    sys.exit(main())
