"""Models and training steps that the data-parallel benchmarks share.

Every variant trains its own copy of the same model.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import cast
from unittest import mock

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


def backend_group(name: str) -> Communicator:
    """Return all ranks over another backend. Collective over the world."""
    with mock.patch.dict(os.environ, {"GLOO_SOCKET_IFNAME": "lo"}):
        return Communicator.of(dist.new_group(backend=name))


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
    """Return a step of the model: `alone`, `ddp`, `compiled ddp`, `blocking` or `non-blocking`.

    Collective. The compiled one is traced, and runs torch's own kernels.
    """
    torch.manual_seed(0)
    make, shape = MODELS[model_name]
    model = make()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    if kind.endswith("ddp") and comm is not None:
        model = DistributedDataParallel(model, process_group=comm.process_group())
        if kind.startswith("compiled"):
            model = cast("nn.Module", torch.compile(model, backend="aot_eager"))
    elif kind != "alone":
        optimizer = DataParallelOptimizer(optimizer)
        model = DataParallel(model, comm, optimizer, kind == "blocking")
    return training_step(model, optimizer, shape)
