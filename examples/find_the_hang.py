"""A mistake that would hang, found by check mode: rank 0 logs, and logging is collective.

The mean over ranks is computed inside `if comm.rank == 0:`. Without help, rank 0 would wait there
for ever while the others go on to the next step.
"""

from __future__ import annotations

import argparse

import torch

import unisono
from unisono.comm import check
from unisono.errors import CollectiveMismatch


def train() -> str | None:
    comm = unisono.world()
    loss = torch.tensor([1.0 + comm.rank])
    with check():  # the same as UNISONO_CHECK=1
        try:
            for _ in range(3):
                if comm.rank == 0:
                    mean = comm.all_reduce(loss, "mean")  # the mistake: only rank 0 comes here
                    print(f"loss {mean.item():.2f}")
                comm.all_reduce_(loss, "max")
        except CollectiveMismatch as error:
            return str(error)
    return None


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    found = unisono.run(train, ranks=parser.parse_args().ranks)
    print(found[0])
    print(f"every rank raised it: {all(text is not None for text in found)}")
