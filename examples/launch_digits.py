"""Train on real digits with DistributedDataParallel: as many ranks as you like, one result.

    python examples/launch_digits.py --ranks 2

`to` moves and wraps a module, `get_dataset_sampler` deals out the data, on every platform alike. At
the end a single rank trains on the same batches, and both arrive at the same weights.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from tqdm import tqdm

import unisono
from unisono.launch.functional import get_dataset_sampler, to

TRAINING = 1408  # a multiple of every batch size below: all ranks get as much in each step


def load():
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    return TensorDataset(x[:TRAINING], y[:TRAINING]), (x[TRAINING:], y[TRAINING:])


def train(platform, epochs, batch=64):
    comm = unisono.world()
    dataset, (test_x, test_y) = load()
    sampler = get_dataset_sampler(dataset, comm.rank, platform, seed=1)
    if sampler is None:  # one rank needs none; this one gives it the same batches as many
        sampler = DistributedSampler(dataset, 1, 0, seed=1)
    loader = DataLoader(dataset, batch_size=batch // comm.size, sampler=sampler)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    replica = to(model, comm.rank)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1, momentum=0.9)
    for epoch in tqdm(range(epochs), desc="epochs", disable=comm.rank != 0):
        sampler.set_epoch(epoch)
        for x, y in loader:
            x, y = x.to(comm.device), y.to(comm.device)
            optimizer.zero_grad()
            nn.functional.cross_entropy(replica(x), y).backward()
            optimizer.step()

    with torch.no_grad():
        guess = model(test_x.to(comm.device)).argmax(1).cpu()
    accuracy = (guess == test_y).float().mean().item()
    return accuracy, [p.detach().cpu() for p in model.parameters()]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--on", default="cpu", help="cpu, gpu, mps or mpi")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args()
    threads = {"OMP_NUM_THREADS": "1"}  # more would only wait for each other with a model so small
    platform = unisono.Platform(device=options.on, ranks=options.ranks, env=threads)
    alone = unisono.Platform(device=options.on, ranks=1, env=threads)
    results = unisono.run(train, platform, options.epochs, on=platform, timeout_s=300)
    single = unisono.run(train, alone, options.epochs, on=alone, timeout_s=300)
    accuracy, weights = results[0]
    print(f"accuracy {accuracy:.1%} on {results.ranks} ranks in {results.wall_s:.1f} s")
    assert accuracy > 0.9
    for other, same in ((results[-1][1], "replicas"), (single[0][1], "many ranks and one")):
        worst = max((a - b).abs().max().item() for a, b in zip(weights, other, strict=True))
        print(f"largest difference between {same}: {worst:.1e}")
        assert worst < 1e-3


main()
