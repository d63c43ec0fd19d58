"""Handwritten digits on many ranks: accuracy above 95 %, and what share of the time waiting took.

Runs blocking, non-blocking, and with gradients that travel as bfloat16.
"""

from __future__ import annotations

import argparse
import time

import torch
from sklearn.datasets import load_digits
from torch import nn

import unisono
from unisono.data_parallel import DataParallel, DataParallelOptimizer

WAYS = {
    "blocking": {"blocking_parameter_updates": True},
    "non-blocking": {},
    "bfloat16": {"compression": "bf16"},
}


def network():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def train(way, epochs):
    torch.manual_seed(0)
    comm = unisono.world()
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(1))
    x = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)[order]
    y = torch.tensor(digits.target)[order]
    train_x, train_y, test_x, test_y = x[:1400], y[:1400], x[1400:], y[1400:]
    net = network()
    optimizer = DataParallelOptimizer(torch.optim.AdamW(net.parameters(), lr=0.01))
    model = DataParallel(net, comm, optimizer, **WAYS[way])
    generator = torch.Generator().manual_seed(2)
    start = time.perf_counter()
    for _ in range(epochs):
        model.train()
        order = torch.randperm(len(train_x), generator=generator)  # the same on all ranks
        for batch in order.split(28 * comm.size):
            mine = batch[comm.rank :: comm.size]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(train_x[mine]), train_y[mine]).backward()
            optimizer.step()
        model.eval()  # pays what is owed
    wall = time.perf_counter() - start
    with torch.no_grad():
        right = model(test_x).argmax(1) == test_y
    stats = model.stats()
    waited = stats.wait_backward_s + stats.wait_forward_s
    return right.float().mean().item(), wall, waited / wall, stats.bytes_per_step


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=6)
    options = parser.parse_args()
    for way in WAYS:
        results = unisono.run(train, way, options.epochs, ranks=options.ranks)
        accuracy, wall, share, nbytes = results[0]
        print(
            f"{way:12} accuracy {accuracy:.3f}, {wall:.2f} s, {100 * share:.0f} % of it in "
            f"communication, {nbytes / 1024:.0f} KB a step"
        )
        assert accuracy > 0.95


if __name__ == "__main__":
    main()
