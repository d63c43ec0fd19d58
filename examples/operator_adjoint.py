"""Write a new linear operator with its adjoint, and let `check_adjoint` prove the pair.

The operator smooths a field that is cut over the ranks: each point becomes the mean of itself and
its two neighbours, some of which live on the next rank.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from torch import Tensor

import unisono
from unisono.comm import Communicator
from unisono.operators import LinearMap
from unisono.testing import check_adjoint


@dataclass(frozen=True)
class RingPlan:
    """The ranks in a ring; each holds a piece of a periodic field."""

    comm: Communicator

    @property
    def adjoint(self) -> RingPlan:
        return self


class Smooth(LinearMap):
    """Three-point mean over a periodic field. Symmetric, so it is its own adjoint."""

    @staticmethod
    def kernel(x: Tensor, plan: RingPlan) -> Tensor:
        comm = plan.comm
        left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        to_right = comm.all_to_all(x[-1:], [int(q == right) for q in range(comm.size)])
        to_left = comm.all_to_all(x[:1], [int(q == left) for q in range(comm.size)])
        padded = torch.cat([to_right, x, to_left])
        return (padded[:-2] + padded[1:-1] + padded[2:]) / 3


Smooth.adjoint = Smooth


def main() -> None:
    comm = unisono.world()
    plan = RingPlan(comm)
    field = torch.sin(torch.arange(4.0, dtype=torch.float64) + 4 * comm.rank)
    other = torch.cos(torch.arange(4.0, dtype=torch.float64) * 2 + comm.rank)
    error = check_adjoint(
        lambda x: Smooth.apply(x, plan), lambda y: Smooth.apply(y, plan), field, other, comm=comm
    )
    x = field.clone().requires_grad_()
    roughness = ((x - Smooth.apply(x, plan)) ** 2).sum()
    (slope,) = torch.autograd.grad(roughness, x, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), x)
    if comm.rank == 0:
        print(f"<Fx, y> and <x, F*y> differ by {error:.1e}, relative")
        print(f"curvature along (1, 1, ...): {curvature.abs().max():.1e} (a constant is smooth)")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    unisono.run(main, ranks=parser.parse_args().ranks)
