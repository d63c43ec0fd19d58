"""A layer of your own on `unisono.nn.Module`: a periodic derivative along a split dim.

Set-up is called on all ranks together, at the first call and whenever somebody's block changes; it
makes the plan of the halo. `check_adjoint` then proves that the backward is the transpose.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor

import unisono
from unisono.nn import Module
from unisono.operators import halo_exchange
from unisono.testing import check_adjoint
from unisono.topology import Partition, halo
from unisono.topology.halo import HaloPlan


class Derivative(Module):
    """Central differences of a periodic field `(n,)` cut over the ranks of a partition."""

    def __init__(self, partition: Partition) -> None:
        super().__init__()
        self.partition = partition  # found by Module: these ranks set up together
        self._plan: HaloPlan | None = None
        self._seen: int | None = None
        self.setups = 0

    def _distdl_input_changed(self, input: tuple[Any, ...]) -> bool:
        return len(input[0]) != self._seen

    def _distdl_module_setup(self, input: tuple[Any, ...]) -> None:
        comm = self.partition.comm
        lengths = [n for (n,) in comm.all_gather_ints([len(input[0])])]
        cuts = [0]
        for length in lengths:
            cuts.append(cuts[-1] + length)
        self._plan = halo.plan_widths([cuts], self.partition.index or (0,), [(1, 1)], "circular")
        self._seen = len(input[0])
        self.setups += 1

    def forward(self, x: Tensor) -> Tensor:
        assert self._plan is not None
        window = halo_exchange(x, self._plan, comm=self.partition.comm)
        return (window[2:] - window[:-2]) / 2


def check() -> tuple[float, int]:
    """Return the error of the adjoint test and how often set-up ran over four calls."""
    comm = unisono.world()
    line = Partition([comm.size])
    layer = Derivative(line)
    for length in (9, 9, 10, 9):
        x = torch.sin(torch.arange(length, dtype=torch.float64))
        layer(x[line.local_slices([length])])
    own = torch.rand(line.local_shape([9]), dtype=torch.float64)
    other = torch.rand(line.local_shape([9]), dtype=torch.float64)
    # The derivative is antisymmetric: its adjoint is its negative.
    error = check_adjoint(layer, lambda y: -layer(y), own, other, comm=comm)
    return error, layer.setups


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    results = list(unisono.run(check, ranks=parser.parse_args().ranks))
    setups = results[0][1]
    print(f"adjoint test: relative error {results[0][0]:.1e}; {setups} set-ups in 4 calls")
    if {setups for _, setups in results} != {3}:
        raise SystemExit("ranks did not set up together")


if __name__ == "__main__":
    main()
