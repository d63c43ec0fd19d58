"""A hidden layer too wide for one rank: columns of the first weight, rows of the second.

The first layer gathers its input and computes its share of the hidden units; the second multiplies
that share and sums over ranks. No rank ever holds a whole weight.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn.functional import gelu

import unisono
from unisono.nn import (
    DistributedLinearAllGather,
    DistributedLinearReduceScatter,
    full_state_dict,
)
from unisono.topology import Partition

WIDTH, HIDDEN, BATCH = 16, 64, 12


class SplitMlp(nn.Module):
    """Two linear layers with the hidden units spread over ranks."""

    def __init__(self, partition: Partition) -> None:
        super().__init__()
        self.up = DistributedLinearAllGather(partition, WIDTH, HIDDEN)
        self.down = DistributedLinearReduceScatter(partition, HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(gelu(self.up(x)))


class Mlp(nn.Module):
    """The same in one process."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(gelu(self.up(x)))


def train() -> tuple[int, float]:
    """Return the largest number of weights a rank holds, and the difference after training."""
    comm = unisono.world()
    features = Partition([1, comm.size])
    torch.manual_seed(0)
    split = SplitMlp(features).double()
    plain = Mlp().double()
    plain.load_state_dict(full_state_dict(split))
    data = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, WIDTH, dtype=torch.float64, generator=data)
    target = torch.sin(x)
    where = features.local_slices(x.shape)
    ours = torch.optim.SGD(split.parameters(), lr=0.1)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(20):
        ((split(x[where]) - target[where]) ** 2).sum().div(BATCH).backward()
        ((plain(x) - target) ** 2).sum().div(BATCH).backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    state = full_state_dict(split)
    worst = max((state[n] - p).abs().max().item() for n, p in plain.state_dict().items())
    return sum(p.numel() for p in split.parameters()), worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    ranks = parser.parse_args().ranks
    held, worst = map(max, zip(*unisono.run(train, ranks=ranks), strict=True))
    whole = sum(p.numel() for p in Mlp().parameters())
    print(f"a rank holds {held} of {whole} weights; after 20 steps they differ by {worst:.1e}")
    if worst > 1e-10:
        raise SystemExit("the split network does not equal the plain one")


if __name__ == "__main__":
    main()
