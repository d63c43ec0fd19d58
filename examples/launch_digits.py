"""Train on real digits with torch's own DistributedDataParallel, started by `unisono.run`.

    python examples/launch_digits.py --ranks 2

`unisono.run` has initialised torch.distributed in every rank, so what you know works as it is.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from tqdm import tqdm

import unisono


def load():
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    cut = len(y) * 4 // 5
    return TensorDataset(x[:cut], y[:cut]), (x[cut:], y[cut:])


def train(epochs, batch=64):
    comm = unisono.world()
    dataset, (test_x, test_y) = load()
    sampler = DistributedSampler(dataset, comm.size, comm.rank, seed=1)
    loader = DataLoader(dataset, batch_size=batch // comm.size, sampler=sampler)

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    replica = DistributedDataParallel(model)  # starts from the weights of rank 0
    optimizer = torch.optim.Adam(replica.parameters(), lr=3e-3)
    for epoch in tqdm(range(epochs), desc="epochs", disable=comm.rank != 0):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(replica(x), y).backward()
            optimizer.step()

    with torch.no_grad():
        accuracy = (model(test_x).argmax(1) == test_y).float().mean().item()
    fingerprint = sum(p.double().sum().item() for p in model.parameters())
    return accuracy, fingerprint


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=12)
    options = parser.parse_args()
    results = unisono.run(train, options.epochs, ranks=options.ranks, timeout_s=300)
    accuracies = [accuracy for accuracy, _ in results]
    assert len({fingerprint for _, fingerprint in results}) == 1, "the replicas differ"
    print(f"accuracy {accuracies[0]:.1%} on {results.ranks} ranks in {results.wall_s:.1f} s")
    assert min(accuracies) > 0.9


main()
