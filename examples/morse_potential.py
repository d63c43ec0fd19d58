"""A small message-passing potential whose graph may be split over ranks, and data to train it on.

`forces_graph_parallel.py` trains it. By itself this file shows how a cluster
is split: who owns which atoms, what has to travel, and that energy and forces stay the same.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import unisono
from unisono import graph_parallel as gp

CUTOFF = 2.2


def cluster(seed, atoms=None, jitter=0.06):
    """Positions of a shaken ball of an fcc crystal, its energy and its forces."""
    draw = torch.Generator().manual_seed(seed)
    atoms = atoms or int(torch.randint(13, 61, (1,), generator=draw))
    cell = torch.cartesian_prod(*[torch.arange(-9.0, 10.0, dtype=torch.float64)] * 3)
    lattice = cell[cell.sum(1) % 2 == 0] / 2**0.5 - torch.rand(3, generator=draw).double()
    shaken = jitter * torch.randn(atoms, 3, generator=draw).double()
    pos = lattice[lattice.norm(dim=1).argsort()[:atoms]] + shaken
    at = pos.clone().requires_grad_()
    i, j = torch.triu_indices(atoms, atoms, 1)
    decay = torch.exp(-3 * ((at[i] - at[j]).norm(dim=1) - 1))
    energy = (decay**2 - 2 * decay).sum()
    return pos, energy.detach(), -torch.autograd.grad(energy, at)[0]


def mlp(inputs, width, outputs):
    return nn.Sequential(nn.Linear(inputs, width), nn.SiLU(), nn.Linear(width, outputs))


class Potential(nn.Module):
    """Atoms exchange messages along edges; each then has an energy."""

    def __init__(self, width=16, layers=3, radial=16):
        super().__init__()
        self.atom = nn.Parameter(torch.ones(width))
        self.messages = nn.ModuleList(mlp(2 * width + radial, width, width) for _ in range(layers))
        self.updates = nn.ModuleList(mlp(width, width, width) for _ in range(layers))
        self.energy = mlp(width, width, 1)
        self.register_buffer("centres", torch.linspace(0.6, CUTOFF, radial))

    def forward(self, pos, plan, mode="halo"):
        """Return this rank's term of the energy, from its own positions."""
        source, target = plan.edge_index
        apart = (plan.extend(pos)[source] - pos[target]).norm(dim=1, keepdim=True)
        near = (
            torch.exp(-16 * (apart - self.centres) ** 2) * torch.cos(1.5708 * apart / CUTOFF) ** 2
        )
        x = self.atom.expand(len(pos), -1)
        for message, update in zip(self.messages, self.updates, strict=True):
            send = lambda a, b, near: message(torch.cat([a, b, near], 1))  # noqa: B023, E731
            if mode == "halo":  # fetch the rows that are needed, work on own edges meanwhile
                total = plan.message_pass(x, send, edge_attr=near)
            else:  # all rows to all ranks; each uses them for its own edges, hence "sum"
                rows = plan.gather(x, grad="sum")[torch.cat([plan.local_nodes, plan.halo_nodes])]
                total = torch.zeros_like(x).index_add(
                    0, target, send(rows[source], x[target], near)
                )
            x = x + update(total / 20)
        return self.energy(x).sum() - 4 * len(pos)


def loss_of(model, sample, comm, mode="halo"):
    """Return the loss of one cluster over the ranks of `comm`, its energy and its forces."""
    pos, energy, forces = sample
    edges = gp.radius_graph(pos, CUTOFF).edge_index
    plan = gp.GraphPlan(gp.GraphPartition.morton(pos, comm.size), edges, comm=comm)
    mine = plan.scatter(pos).requires_grad_()
    term = model(mine, plan, mode)
    own = -torch.autograd.grad(term, mine, create_graph=True)[0]  # complete: nothing to reduce
    total = plan.reduce(term, grad="identity")
    wrong = plan.reduce(((own - plan.scatter(forces)) ** 2).sum(), grad="identity")
    loss = (total - energy) ** 2 / len(pos) + wrong / (3 * len(pos))
    return loss, total.detach(), plan.gather(own.detach(), grad="slice")


def look(atoms):
    torch.manual_seed(0)
    model, sample, comm = Potential().double(), cluster(0, atoms), unisono.world()
    edges = gp.radius_graph(sample[0], CUTOFF).edge_index
    stats = gp.GraphPartition.morton(sample[0], comm.size).stats(edges)
    many = loss_of(model, sample, comm)
    one = loss_of(model, sample, gp.graph_groups(1).gp)
    far = [float((a - b).abs().max().detach()) for a, b in zip(many, one, strict=True)]
    return stats.table(), far


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--atoms", type=int, default=300)
    options = parser.parse_args()
    table, (_, energy, forces) = unisono.run(look, options.atoms, ranks=options.ranks)[0]
    print(table)
    print(f"energy and forces differ from one process by {energy:.1e} and {forces:.1e}")


if __name__ == "__main__":
    main()
