"""See where a training step's time goes: a trace of torch's own DDP, for Perfetto.

DDP's collectives appear because they run on a backend of ours (`shm`). Open the file that is
written in https://ui.perfetto.dev, or read the table.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import unisono
from unisono.comm import trace


def train(path: str) -> str:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with trace(path) as t:
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(16, 64)).pow(2).mean().backward()
            optimizer.step()
        unisono.world().barrier()
    return t.table()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", help="keep the file here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(options.out or Path(scratch) / "trace.json")
        table = unisono.run(train, str(path), ranks=options.ranks)[0]
        print(table)
        print(f"trace of {path.stat().st_size} bytes" + (f" in {path}" if options.out else ""))
