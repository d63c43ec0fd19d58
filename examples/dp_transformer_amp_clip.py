"""A transformer on rows of digits: autocast, gradient clipping and a scheduler per batch.

Everything in the loop is torch's own; the updates are deferred and the numbers are the same.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

import unisono
from unisono.data_parallel import DataParallel, DataParallelOptimizer


class Reader(nn.Module):
    """Reads a digit as eight rows of eight pixels."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Linear(8, 32)
        self.place = nn.Parameter(torch.zeros(8, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.encoder(self.rows(x) + self.place).mean(1))


def train(epochs):
    torch.manual_seed(0)
    comm = unisono.world()
    digits = load_digits()
    x, y = torch.tensor(digits.images / 16, dtype=torch.float32), torch.tensor(digits.target)
    mine = slice(comm.rank, 1440, comm.size)
    xs, ys = x[mine].split(48), y[mine].split(48)
    net = Reader()
    optimizer = DataParallelOptimizer(torch.optim.AdamW(net.parameters(), lr=1e-3))
    model = DataParallel(net, comm, optimizer)
    total = epochs * len(xs)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=total)
    norms = []
    for _ in range(epochs):
        model.train()
        for xb, yb in zip(xs, ys, strict=True):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(model(xb), yb)
            loss.backward()
            norms.append(model.clip_grad_norm(1.0).item())
            optimizer.step()
            scheduler.step()
        model.eval()
    with torch.no_grad():
        right = model(x[1440:]).argmax(1) == y[1440:]
    return right.float().mean().item(), max(norms)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=6)
    options = parser.parse_args()
    results = unisono.run(train, options.epochs, ranks=options.ranks)
    assert len(set(results)) == 1, "accuracy and gradient norms are the same on all ranks"
    accuracy, norm = results[0]
    print(f"accuracy {accuracy:.3f}; largest gradient norm before clipping {norm:.2f}")


if __name__ == "__main__":
    main()
