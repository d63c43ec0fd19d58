"""MACE, as it comes, with its atoms shared by ranks: trained on forces and stress, then moved.

Random weights are fitted to a Morse crystal for a few steps, and compared with one process. Then
ASE moves the atoms with the trained model on ranks that stay. Needs `unisono[potentials]`.
"""

from __future__ import annotations

import argparse
import logging
import warnings

import numpy as np
import torch

import unisono
from unisono import graph_parallel as gp

warnings.simplefilter("ignore")  # MACE and e3nn use much that is old
logging.disable(logging.INFO)


def mace_model():
    """Return a small MACE for copper, in float64."""
    from mace import modules  # before e3nn, for which it sets what newer torch wants

    from e3nn import o3  # isort: skip

    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    interaction = modules.interaction_classes["RealAgnosticResidualInteractionBlock"]
    return modules.ScaleShiftMACE(
        r_max=4.0,
        num_bessel=6,
        num_polynomial_cutoff=5,
        max_ell=2,
        interaction_cls=interaction,
        interaction_cls_first=interaction,
        num_interactions=2,
        num_elements=1,
        hidden_irreps=o3.Irreps("8x0e + 8x1o"),
        MLP_irreps=o3.Irreps("8x0e"),
        atomic_energies=np.zeros(1),
        avg_num_neighbors=18.0,
        atomic_numbers=[29],
        correlation=2,
        gate=torch.nn.functional.silu,
        atomic_inter_scale=1.0,
        atomic_inter_shift=0.0,
    )


def crystal(cubes, seed):
    from ase.build import bulk

    atoms = bulk("Cu", cubic=True).repeat(cubes)
    atoms.rattle(0.1, seed=seed)
    return atoms


def truth(atoms):
    """Return energy and forces of Morse pairs, the data to be learned."""
    from ase.calculators.morse import MorsePotential

    atoms.calc = MorsePotential(epsilon=0.3, r0=2.6, rho0=4.0, rcut1=3.2, rcut2=4.0)
    return atoms.get_potential_energy(), torch.tensor(atoms.get_forces())


def train(cubes, steps):
    """Return the losses and the trained weights; the same loop for one rank and for many."""
    model = mace_model()
    samples = [crystal(cubes, seed) for seed in range(4)]
    wanted = [truth(atoms) for atoms in samples]
    with gp.use_groups(gp.graph_groups(unisono.world().size)):
        part = gp.GraphPartition.morton(torch.tensor(samples[0].positions), unisono.world().size)
        split = gp.split_potential(model, part)
        net = gp.GraphParallel(split)
        optimizer, losses = torch.optim.Adam(net.parameters(), lr=0.01), []
        for step in range(steps):
            atoms, (energy, forces) = samples[step % 4], wanted[step % 4]
            pos, numbers = torch.tensor(atoms.positions), torch.tensor(atoms.numbers)
            out = net(pos, numbers, cell=torch.tensor(atoms.cell.array), stress=True)
            loss = ((out.energy - energy) / len(atoms)) ** 2 + (out.forces - forces).square().mean()
            loss = loss + out.stress.square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if unisono.world().rank == 0 and split.plan is not None:
            print(split.plan.stats.table(), flush=True)
    return losses, model.state_dict()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--cubes", type=int, default=3, help="of four atoms, along each side")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    losses, weights = unisono.run(train, options.cubes, options.steps, ranks=options.ranks)[0]
    alone, _ = train(options.cubes, min(options.steps, 4))
    apart = max(abs(a - b) / a for a, b in zip(alone, losses, strict=False))
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}; apart from one process by {apart:.1e}")
    assert apart < 1e-8

    from ase import units
    from ase.md.verlet import VelocityVerlet

    model = mace_model()
    model.load_state_dict(weights)
    atoms = crystal(options.cubes, seed=9)
    with gp.Calculator(model, ranks=options.ranks) as atoms.calc:
        energies = [atoms.get_total_energy() for _ in VelocityVerlet(atoms, units.fs).irun(10)]
    assert np.ptp(energies) < 0.01 * abs(energies[0])
    print(f"10 steps of dynamics: energy {energies[0]:.4f} eV, drift {np.ptp(energies):.1e} eV")


if __name__ == "__main__":
    main()
