"""Solve the heat equation on a field cut over ranks: halos come from the neighbours.

Each step needs one point more on every side. `HaloExchange` brings them, wrapped around at the ends
(circular) or mirrored (reflect); the result equals that of one process, gradients too.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor
from torch.nn import functional as F

import unisono
from unisono.nn import HaloExchange
from unisono.topology import Partition, draw

SIZE, STEPS = 32, 20


def smoothed(window: Tensor) -> Tensor:
    """Return one explicit step, for the points that have all four neighbours."""
    inside = window[1:-1, 1:-1]
    around = window[:-2, 1:-1] + window[2:, 1:-1] + window[1:-1, :-2] + window[1:-1, 2:]
    return inside + 0.2 * (around - 4 * inside)


def heat(border: str) -> tuple[float, float, str]:
    """Return the largest errors of field and gradient, and a picture of who holds what."""
    comm = unisono.world()
    grid = Partition([comm.size, 1])
    halo = HaloExchange.from_widths(grid, [(1, 1), (1, 1)], border)
    start = torch.zeros(SIZE, SIZE, dtype=torch.float64)
    start[5:12, 20:30] = 1.0
    where = grid.local_slices(start.shape)

    own = start[where].clone().requires_grad_()
    field = own
    for _ in range(STEPS):
        field = smoothed(halo(field))
    (field**2).sum().backward()

    whole = start.clone().requires_grad_()
    expected = whole
    for _ in range(STEPS):
        expected = smoothed(F.pad(expected[None, None], (1, 1, 1, 1), border)[0, 0])
    (expected**2).sum().backward()
    assert own.grad is not None
    assert whole.grad is not None
    error = (field - expected[where]).abs().max().item()
    slope = (own.grad - whole.grad[where]).abs().max().item()
    return error, slope, draw(grid, (SIZE, SIZE), [(1, 1), (1, 1)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    ranks = parser.parse_args().ranks
    for border in ("circular", "reflect"):
        results = list(unisono.run(heat, border, ranks=ranks))
        error, slope = max(r[0] for r in results), max(r[1] for r in results)
        print(f"{border}: field differs by {error:.1e}, gradient by {slope:.1e}")
        if max(error, slope) > 1e-12:
            raise SystemExit("the seams show")
    print(results[0][2])


if __name__ == "__main__":
    main()
