"""Sizes that change on one rank only: no hang, a new plan, the right answer.

Nine points on two ranks are blocks of five and four; ten are five and five. Rank 0 sees no change,
rank 1 does. Layers agree in every forward, so both make a new plan together.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import unisono
from unisono.nn import DistributedFeatureConv1d, structure_check
from unisono.topology import Partition


def run_sizes() -> list[tuple[int, tuple[int, ...], float]]:
    """Return, for each length, the own block and the difference to one process."""
    comm = unisono.world()
    line = Partition([1, 1, comm.size])
    torch.manual_seed(0)
    split = DistributedFeatureConv1d(line, 1, 1, 3, padding=1, dtype=torch.float64)
    plain = nn.Conv1d(1, 1, 3, padding=1, dtype=torch.float64)
    plain.load_state_dict(split.state_dict())
    rows: list[tuple[int, tuple[int, ...], float]] = []
    for length in (9, 10, 9, 12, 1):
        x = torch.linspace(0, 1, length, dtype=torch.float64).reshape(1, 1, length)
        own = x[line.local_slices(x.shape)]
        with structure_check("always"):  # the default
            y = split(own)
        z = plain(x)[line.local_slices(x.shape)]
        error = (y - z).abs().max().item() if z.numel() else 0.0
        rows.append((length, tuple(own.shape), error))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    results = list(unisono.run(run_sizes, ranks=parser.parse_args().ranks))
    for calls in zip(*results, strict=True):
        blocks = ", ".join(str(list(shape)) for _, shape, _ in calls)
        worst = max(error for _, _, error in calls)
        print(f"{calls[0][0]:>3} points as {blocks}: differs by {worst:.1e}")
        if worst > 1e-12:
            raise SystemExit("the split convolution does not equal the plain one")


if __name__ == "__main__":
    main()
