"""An ordinary training script on any number of ranks; docs/your_script.md shows every changed line.

Mixed precision, gradient accumulation, clipping, a scheduler per step, loader workers, evaluation,
the best checkpoint, resuming, a progress bar and a tracker.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset, random_split
from tqdm import tqdm

import unisono
from unisono.data_parallel import DataParallel
from unisono.train import Checkpoint

BATCH, ACCUMULATE = 64, 2


def digits():
    data = load_digits()
    images = torch.tensor(data.images / 16, dtype=torch.float32).unsqueeze(1)
    rows = TensorDataset(images, torch.tensor(data.target))
    return random_split(rows, [1536, 261], torch.Generator().manual_seed(0))


def network():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def train(options):
    torch.manual_seed(0)
    comm = unisono.world()
    device = comm.device
    train_rows, test_rows = digits()
    sampler = DistributedSampler(train_rows, comm.size, comm.rank, seed=0)
    loader = DataLoader(train_rows, BATCH // comm.size, sampler=sampler, num_workers=2)
    share = Subset(test_rows, range(comm.rank, len(test_rows), comm.size))
    test_loader = DataLoader(share, BATCH)
    model = network()
    if options.compile:
        model = torch.compile(model, backend=options.compile)
    model = DataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    steps = options.epochs * len(loader) // ACCUMULATE
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=steps)
    precision = torch.autocast(device.type, torch.bfloat16, enabled=not options.full_precision)
    checkpoint = Checkpoint(options.folder, keep=1, keep_best="max")
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    restored = checkpoint.restore(**state)
    history = []
    for epoch in range(restored.step if restored else 0, options.epochs):
        model.train()
        sampler.set_epoch(epoch)
        total = torch.zeros((), device=device)
        progress = tqdm(loader, f"epoch {epoch + 1}", disable=comm.rank > 0)
        for number, (x, y) in enumerate(progress, start=1):
            x, y = x.to(device), y.to(device)
            complete = number % ACCUMULATE == 0
            with contextlib.nullcontext() if complete else model.no_sync():
                with precision:
                    loss = nn.functional.cross_entropy(model(x), y) / ACCUMULATE
                loss.backward()
            total += loss.detach()
            if complete:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        loss = comm.all_reduce(total, op="mean").item() * ACCUMULATE / len(loader)

        model.eval()
        right = torch.zeros((), device=device)
        with torch.no_grad():
            for x, y in test_loader:
                right += (model(x.to(device)).argmax(1) == y.to(device)).sum()
        accuracy = comm.all_reduce(right).item() / len(test_rows)

        checkpoint.save(epoch + 1, metric=accuracy, **state)
        history.append((epoch + 1, loss, accuracy))
        if comm.rank == 0:
            with (Path(options.folder) / "history.csv").open("a") as file:
                csv.writer(file).writerow(history[-1])
            print(f"epoch {epoch + 1}: loss {loss:.4f}, accuracy {accuracy:.3f}")
        if len(history) == options.stop_after:
            break
    return history


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--stop-after", type=int, metavar="EPOCHS", help="resume later")
    parser.add_argument("--folder", default="runs/your_script")
    parser.add_argument("--full-precision", action="store_true", help="no autocast")
    parser.add_argument("--compile", metavar="BACKEND", help="torch.compile, such as inductor")
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    unisono.run(train, options, ranks=options.ranks)


if __name__ == "__main__":
    main()
