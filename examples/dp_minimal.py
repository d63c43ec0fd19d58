"""One line makes a training loop parallel: `model = DataParallel(model)`.

Trains on the digits of scikit-learn and prints the accuracy on held-out digits.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

import unisono
from unisono.data_parallel import DataParallel


def train(epochs):
    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    comm = unisono.world()
    mine = slice(comm.rank, 1440, comm.size)  # this rank's share of the first 1440 digits
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model = DataParallel(model)  # the one line
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(epochs):
        for xb, yb in zip(x[mine].split(40), y[mine].split(40), strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(xb), yb).backward()
            optimizer.step()
    right = model(x[1440:]).argmax(1) == y[1440:]
    return right.float().mean().item(), str(model.stats())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    for rank, (accuracy, cost) in enumerate(
        unisono.run(train, options.epochs, ranks=options.ranks)
    ):
        print(f"rank {rank}: accuracy {accuracy:.3f} ({cost})")


if __name__ == "__main__":
    main()
