"""A global shuffle over two ranks against a local one of all rows on one rank.

python benchmarks/data_parallel/sampler.py [--quick]
"""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from harness import Row, interleaved, markdown, parser_for, publish

import unisono
from unisono.comm import world
from unisono.data_parallel import DistributedDataset, DistributedSampler, shard


def measure(n_rows: int, rounds: int) -> list[Row]:
    """Measure on the ranks of the world; the reference runs on rank 0 alone."""
    torch.set_num_threads(1)
    comm = world()
    x = torch.randn(n_rows, 16, generator=torch.Generator().manual_seed(0))
    dataset = DistributedDataset(shard(x).clone())
    sampler = DistributedSampler(dataset, shuffle=True, seed=0)
    epochs = itertools.count(1)

    def local() -> None:
        if comm.rank == 0:
            x[torch.randperm(n_rows)]

    times = interleaved(
        comm,
        {"ours": lambda: sampler.set_epoch(next(epochs)), "reference": local},
        rounds=rounds,
    )
    return [
        Row(
            f"global shuffle {n_rows:.0e} x 16 float32, {comm.size} ranks, {comm.backend}",
            times["ours"],
            times["reference"],
            "x[torch.randperm(n)] on one rank",
            4.0,
        )
    ]


def main() -> None:
    """Run on both backends and write the table."""
    quick = parser_for(__doc__).parse_args().quick
    os.environ["OMP_NUM_THREADS"] = "1"
    rows: list[Row] = []
    for backend in ("shm", "gloo"):
        os.environ["UNISONO_BACKEND"] = backend
        size, rounds = (100_000, 3) if quick else (1_000_000, 9)
        rows += unisono.run(measure, size, rounds, ranks=2, timeout_s=600)[0]
    publish("Shuffle over ranks", markdown(rows), write=not quick)


if __name__ == "__main__":
    main()
