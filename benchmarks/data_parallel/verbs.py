"""The MPI-style communicator against torch.distributed on the same group.

    python benchmarks/data_parallel/verbs.py [--quick]

What its checks, the choice of an algorithm and the way through a `Communicator` cost or save.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from harness import Row, interleaved, markdown, parser_for, publish

import unisono
from unisono.comm import world
from unisono.comm.mpi_style import MPI, MPI_WORLD

SIZES = {"1 KB": 256, "1 MB": 262_144}
"""Elements of float32."""
TARGET = 1.10


def verbs(backend: str, rounds: int) -> list[Row]:
    """Measure on the ranks of the world."""
    comm, rows = MPI_WORLD, []
    for name, n in SIZES.items():
        x, out = torch.zeros(n), torch.zeros(n)

        def copied(x: torch.Tensor = x, out: torch.Tensor = out) -> None:
            out.copy_(x)
            dist.all_reduce(out)

        pairs = {
            "in place": (
                lambda x=x: comm.Allreduce(MPI.IN_PLACE, x),
                lambda x=x: dist.all_reduce(x),
            ),
            "into another buffer": (lambda x=x, out=out: comm.Allreduce(x, out), copied),
        }
        for way, (ours, reference) in pairs.items():
            times = interleaved(
                world(),
                {"ours": ours, "ref": reference},
                rounds=rounds * (4 if n < 1000 else 2),
                repeats=10 if n < 1000 else 3,
            )
            case = f"Allreduce {name}, {way}, {backend}, {comm.size} ranks"
            rows.append(Row(case, times["ours"], times["ref"], "dist.all_reduce", TARGET))
    return rows


def main() -> None:
    """Run all cases and write the table."""
    quick = parser_for(__doc__).parse_args().quick
    os.environ["OMP_NUM_THREADS"] = "1"
    rows: list[Row] = []
    for backend in ("gloo", "shm"):
        os.environ["UNISONO_BACKEND"] = backend
        rows += unisono.run(verbs, backend, 3 if quick else 15, ranks=2)[0]
    publish("MPI-style verbs", markdown(rows), write=not quick)


if __name__ == "__main__":
    main()
