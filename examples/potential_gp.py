"""A message-passing potential trained on energies and forces, its graphs split over ranks.

    python examples/potential_gp.py --gp 2 --dp 2 --mode halo --check-serial

A row of `gp` ranks shares one Morse cluster of 13 to 60 atoms, `dp` rows work on different ones.
Forces are derivatives of the energy: training takes second derivatives through the exchanges.
"""

from __future__ import annotations

import argparse

import torch
from morse_potential import Potential, cluster, loss_of

import unisono
from unisono import graph_parallel as gp


def difference_from_one_process(model, groups, mode="halo"):
    """Return how far energy, forces and gradients of all ranks are from those of this one."""
    found, mine_first = [], sorted(range(groups.dp.size), key=lambda row: row != groups.dp.rank)
    for comm, seeds in ((groups.gp, mine_first[:1]), (gp.graph_groups(1).gp, mine_first)):
        model.zero_grad()
        results = [loss_of(model, cluster(seed), comm, mode) for seed in seeds]
        torch.stack([loss for loss, *_ in results]).mean().backward()
        if not found:
            gp.sync_gradients(model, groups=groups)
        found.append([*results[0][1:], *(p.grad.clone() for p in model.parameters())])
    return max(float((a - b).abs().max()) for a, b in zip(*found, strict=True))


def train(size, mode, check_serial, steps):
    torch.manual_seed(0)
    model, groups = Potential().double(), gp.graph_groups(size)
    far = difference_from_one_process(model, groups, mode) if check_serial else None
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=3e-2), []
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        optimizer.zero_grad()
        loss, *_ = loss_of(model, cluster(step * groups.dp.size + groups.dp.rank), groups.gp, mode)
        loss.backward()
        gp.sync_gradients(model, groups=groups)
        optimizer.step()
        schedule.step()
        losses.append(groups.dp.all_reduce(loss.detach(), "mean").item())
    return far, losses


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for flag, default in (("--gp", 0), ("--dp", 1), ("--ranks", 2), ("--steps", 200)):
        parser.add_argument(flag, type=int, default=default)
    parser.add_argument("--mode", choices=["halo", "gather"], default="halo")
    parser.add_argument("--check-serial", action="store_true")
    o = parser.parse_args()
    size = o.gp or max(1, o.ranks // o.dp)
    work = (train, size, o.mode, o.check_serial, o.steps)
    far, losses = unisono.run(*work, ranks=size * o.dp)[0]
    if far is not None:
        print(f"{o.dp} x {size} ranks and one process differ by {far:.1e}")
    first, last = (sum(part) / len(part) for part in (losses[:10], losses[-10:]))
    print(f"mean loss of the first steps {first:.2f}, of the last {last:.2f}")


if __name__ == "__main__":
    main()
