"""Models, training steps and the timing that the data-parallel benchmarks share.

Every variant trains its own copy of the same model. Variants take turns in blocks of steps; a block
counts its slowest rank; what is judged is the median over rounds of the ratio within a round.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from unisono.comm import Communicator, world
from unisono.data_parallel import DataParallel, DataParallelOptimizer

BATCH = 64
Step = Callable[[], object]


class Encoder(nn.Module):
    """Six transformer layers of width 128 over sequences of 16, and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of `x`, `[N, 16, 128]`."""
        return self.head(self.encoder(x).mean(1))


def mlp() -> nn.Module:
    """Return the MLP 784-1024-1024-10."""
    return nn.Sequential(
        nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )


def cnn() -> nn.Module:
    """Return two convolutions and two linear layers for 28 x 28 pictures."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 49, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP": (mlp, (784,)),
    "CNN": (cnn, (1, 28, 28)),
    "TransformerEncoder": (Encoder, (16, 128)),
}


@dataclass(frozen=True)
class Timing:
    """Seconds per step of one variant, one figure a round."""

    rounds: list[float]

    @property
    def median(self) -> float:
        """Median over rounds."""
        return statistics.median(self.rounds)

    def ratio(self, reference: Timing) -> float:
        """Median of the ratios within a round."""
        pairs = zip(self.rounds, reference.rounds, strict=True)
        return statistics.median(a / b for a, b in pairs)

    def spread(self, reference: Timing) -> str:
        """Range of the ratios within a round, as text."""
        ratios = [a / b for a, b in zip(self.rounds, reference.rounds, strict=True)]
        return f"{min(ratios):.2f}-{max(ratios):.2f}"


def backend_group(name: str) -> Communicator:
    """Return all ranks over another backend. Collective over the world."""
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if name == "gloo" else {}
    before = {key: os.environ.get(key) for key in loopback}
    os.environ.update(loopback)
    try:
        return Communicator.of(dist.new_group(backend=name))
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)


def training_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, shape: tuple[int, ...]
) -> Step:
    """Return one step of `model` on a fixed batch of this rank."""
    generator = torch.Generator().manual_seed(world().rank)
    x = torch.randn(BATCH, *shape, generator=generator)
    y = torch.randint(10, (BATCH,), generator=generator)
    loss = nn.CrossEntropyLoss()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss(model(x), y).backward()
        optimizer.step()

    return step


def variant(kind: str, model_name: str, comm: Communicator | None) -> Step:
    """Return a step of the model: `alone`, `ddp`, `blocking` or `non-blocking`. Collective."""
    torch.manual_seed(0)
    make, shape = MODELS[model_name]
    model = make()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    if kind == "ddp" and comm is not None:
        model = DistributedDataParallel(model, process_group=comm.process_group())
    elif kind != "alone":
        optimizer = DataParallelOptimizer(optimizer)
        model = DataParallel(model, comm, optimizer, kind == "blocking")
    return training_step(model, optimizer, shape)


def take_turns(
    comm: Communicator, steps: Mapping[str, Step], *, rounds: int, warm_up: int, count: int
) -> dict[str, Timing]:
    """Time all variants, a block of `count` steps each a round. Collective over `comm`."""
    for step in steps.values():
        for _ in range(warm_up):
            step()
    times = torch.zeros(rounds, len(steps), dtype=torch.float64)
    for i in range(rounds):
        for j, step in enumerate(steps.values()):
            comm.barrier()
            start = time.perf_counter()
            for _ in range(count):
                step()
            times[i, j] = (time.perf_counter() - start) / count
    slowest = comm.all_reduce(times, "max")
    return {name: Timing(slowest[:, j].tolist()) for j, name in enumerate(steps)}
