"""Ranks with different numbers of batches, and batches of different sizes: no sample is dropped.

`join` lets ranks that have run out follow the others; `samples` weights each batch by its length.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

import unisono
from unisono.data_parallel import DataParallel, DataParallelOptimizer


def train(epochs):
    torch.manual_seed(0)
    comm = unisono.world()
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    # Rank r has about r + 1 shares of the data, which do not divide into whole batches.
    shares = comm.size * (comm.size + 1) // 2
    begin = comm.rank * (comm.rank + 1) // 2 * 1437 // shares
    end = (comm.rank + 1) * (comm.rank + 2) // 2 * 1437 // shares
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = DataParallelOptimizer(torch.optim.Adam(net.parameters(), lr=0.01))
    model = DataParallel(net, comm, optimizer)
    batches = 0
    for _ in range(epochs):
        with model.join():
            for xb, yb in zip(x[begin:end].split(40), y[begin:end].split(40), strict=True):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(xb), yb)
                with model.samples(len(xb)):
                    loss.backward()
                optimizer.step()
                batches += 1
    model.eval()
    right = model(x[1437:]).argmax(1) == y[1437:]
    digest = sum(p.double().sum().item() for p in model.parameters())
    return batches, end - begin, right.float().mean().item(), digest


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args()
    results = unisono.run(train, options.epochs, ranks=options.ranks)
    for rank, (batches, samples, accuracy, _) in enumerate(results):
        print(f"rank {rank}: {samples} samples, {batches} batches, accuracy {accuracy:.3f}")
    assert len({digest for *_, digest in results}) == 1, "all ranks end with equal parameters"


if __name__ == "__main__":
    main()
