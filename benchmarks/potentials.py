"""Potentials: MACE's steps and memory on two ranks, the energy of a long run, and error bars.

    python benchmarks/potentials.py [--fairchem PATH] [--quick]

A step of MACE moves the atoms, so it has everything: the search for neighbours, the plan, the
scatter, the exchanges, the gather. The long run is ASE's velocity Verlet without a thermostat, on
a Morse crystal: what its total energy wanders by must not depend on the number of ranks. Structures
are chosen by the code of the tutorial that asks which one to compute next. PATH is a virtual
environment with fairchem-core, whose own graph parallelism stands beside MACE's on ours.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import resource
import subprocess
import time
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import Figure, figure_table, interleaved, parser_for, publish
from torch import nn

import unisono
from graph_parallel import TextbookP
from unisono import graph_parallel as gp

CUTOFF = 4.5
"""Of the Morse crystal, in angstrom."""


def mace_model(cutoff: float) -> torch.nn.Module:
    """A MACE of copper with the usual two layers, random weights, float32."""
    from mace import modules  # before e3nn, for which it sets what newer torch wants

    from e3nn import o3  # isort: skip

    torch.manual_seed(0)
    block = modules.interaction_classes["RealAgnosticResidualInteractionBlock"]
    return modules.ScaleShiftMACE(
        r_max=cutoff, num_bessel=8, num_polynomial_cutoff=5, max_ell=3, interaction_cls=block,
        interaction_cls_first=block, num_interactions=2, num_elements=1, correlation=3,
        hidden_irreps=o3.Irreps("32x0e + 32x1o"), MLP_irreps=o3.Irreps("16x0e"),
        atomic_energies=np.zeros(1), avg_num_neighbors=18.0, atomic_numbers=[29],
        gate=torch.nn.functional.silu, atomic_inter_scale=1.0, atomic_inter_shift=0.0,
    ).eval().requires_grad_(False)  # fmt: skip


def crystal(cubes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cell and the positions of a copper crystal of so many cubes a side, shaken."""
    grid = torch.cartesian_prod(*[torch.arange(cubes, dtype=torch.float32)] * 3)
    corners = torch.tensor([[0, 0, 0], [0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]])
    pos = 3.6 * (grid[:, None] + corners).reshape(-1, 3)
    pos += 0.1 * torch.randn(pos.shape, generator=torch.Generator().manual_seed(0))
    return 3.6 * cubes * torch.eye(3), pos


def mace_steps(cubes: int, rounds: int) -> dict[str, float]:
    """Seconds of a step (energy, forces, stress), of its exchanges, and the peak memory in MB."""
    torch.set_num_threads(1)
    comm = unisono.world()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = mace_model(4.0)
    cell, pos = crystal(cubes)
    given = {"cell": cell, "numbers": torch.full((len(pos),), 29), "stress": True}
    draw = torch.Generator().manual_seed(1)
    moved = pos + 0.05 * torch.randn(pos.shape, generator=draw)  # other neighbours, another plan
    turns = itertools.cycle([moved, pos])
    part = gp.GraphPartition.morton(pos, comm.size)
    potential = gp.split_potential(model, part, comm=comm).eval()
    potential(pos, **given)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    plan = potential.plan
    rows = torch.randn(plan.num_local, 128, requires_grad=True)  # 32 scalars, 32 vectors

    held = part.inverse[torch.cat([plan.local_nodes, plan.halo_nodes])]
    runs = {  # what a layer fetches, and forces bring back
        "step": lambda: potential(next(turns), **given),
        "exchange": lambda: plan.extend(rows).sum().backward(),
    }
    if comm.size > 1:
        runs["gather"] = lambda: TextbookP.apply(rows)[held].sum().backward()
    return interleaved(comm, runs, rounds=rounds) | {"peak": peak}


def mace(quick: bool) -> list[Figure]:
    """MACE on a crystal, two ranks against one process; nothing where it is not installed."""
    if find_spec("mace") is None:
        return []
    cubes, rounds = (4, 2) if quick else (8, 5)
    atoms = 4 * cubes**3
    idle = unisono.run(mace_idle, ranks=1)[0]
    one, two = (unisono.run(mace_steps, cubes, rounds, ranks=n)[0] for n in (1, 2))
    name = f"MACE, {atoms} atoms"
    return [
        Figure(f"{name}: step, all included, 2 ranks / 1", two["step"] / one["step"], 0.55,
               f"{two['step']:.2f} s"),
        Figure(f"{name}: peak memory per rank above an idle one, 2 ranks / 1",
               (two["peak"] - idle) / (one["peak"] - idle), 0.65, f"{two['peak'] - idle:.0f} MB"),
        Figure(f"{name}: exchange of features / step, shm", two["exchange"] / two["step"], 0.05,
               f"{two['exchange'] * 1e3:.1f} ms"),
        Figure(f"{name}: exchange of features / all_gather of all",
               two["exchange"] / two["gather"], 0.8, f"{two['gather'] * 1e3:.1f} ms"),
    ]  # fmt: skip


def fairchem(path: Path | None) -> list[Figure]:
    """What a second rank saves fairchem's own model by fairchem's own means, over gloo."""
    if path is None:
        return []
    python, script = str(path / "bin" / "python"), Path(__file__).with_name("fairchem_step.py")
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    one, two = (
        json.loads(
            subprocess.run(
                [python, *words, str(script)], stdout=subprocess.PIPE, text=True, check=True
            ).stdout.splitlines()[-1]
        )
        for words in ([], ranks)
    )
    name = f"fairchem's eSCN-MD by its own means, {one['atoms']} atoms"
    off = abs(two["energy"] / one["energy"] - 1)
    note = f"{two['step']:.2f} s; energies differ by {off:.0e}"
    return [Figure(f"{name}: step, 2 ranks / 1", two["step"] / one["step"], 1.0, note)]


def mace_idle() -> float:
    """Peak memory in MB of a rank that has loaded MACE, and done nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mace_model(4.0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class Morse(nn.Module):
    """Half of the energy of a Morse pair for each edge, smoothly to nothing at the cutoff."""

    def forward(self, piece: gp.Piece) -> torch.Tensor:
        """Return the energies of edges that end in own atoms."""
        apart = piece.vectors.norm(dim=1)
        decay = torch.exp(-1.4 * (apart - 2.6))
        return 0.15 * (decay**2 - 2 * decay) * (1 - (apart / CUTOFF) ** 2) ** 3


def wandering(ranks: int, cubes: int, steps: int) -> tuple[float, float]:
    """Return by how much the total energy of an atom wanders, in eV, and seconds per step."""
    from ase import units
    from ase.build import bulk
    from ase.md.velocitydistribution import Stationary
    from ase.md.verlet import VelocityVerlet

    atoms = bulk("Cu", cubic=True).repeat(cubes)
    draw = np.random.RandomState(0)
    atoms.set_velocities(0.03 * draw.standard_normal((len(atoms), 3)))
    Stationary(atoms)
    adapter = gp.Adapter(lambda model, piece: model(piece), lambda _: CUTOFF)
    weights = nn.Module.double(Morse())
    with gp.Calculator(weights, ranks=ranks, adapter=adapter) as atoms.calc:
        atoms.get_forces()
        start = time.perf_counter()
        energies = [
            atoms.get_total_energy() for _ in VelocityVerlet(atoms, 2 * units.fs).irun(steps)
        ]
        seconds = (time.perf_counter() - start) / steps
    return float(np.ptp(energies)) / len(atoms), seconds


def long_run(quick: bool) -> list[Figure]:
    """Dynamics at constant energy, two ranks against one; nothing where ASE is not installed."""
    if find_spec("ase") is None:
        return []
    cubes, steps = (3, 50) if quick else (4, 2000)
    (one, alone), (two, together) = (wandering(ranks, cubes, steps) for ranks in (1, 2))
    name = f"NVE, {4 * cubes**3} atoms, {steps:,} steps"
    note = f"{two:.1e} eV an atom; {1e3 * together:.0f} ms a step, {1e3 * alone:.0f} ms by one"
    return [Figure(f"{name}: wandering of the energy, 2 ranks / 1", two / one, 1.05, note)]


def next_structures(quick: bool) -> list[Figure]:
    """Errors after five rounds of choosing structures by error bar, against choosing at random."""
    if find_spec("ase") is None:
        return []
    page = Path(__file__).parents[1] / "docs" / "tutorials" / "next_structure.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {"__name__": "tutorial"}
    exec("\n".join(block for block in blocks if "unisono.run" not in block), names)
    seeds = range(1 if quick else 5)
    chosen, drawn = (
        np.array([names["choose"](seed, by_error_bar)[-1] for seed in seeds])
        for by_error_bar in (True, False)
    )
    note = f"{chosen.mean():.0f} and {drawn.mean():.0f} meV an atom"
    name = f"26 of 105 structures, {len(seeds)} seeds: error by error bar / at random"
    return [
        Figure(f"{name}, mean", float(chosen.mean() / drawn.mean()), 0.6, note),
        Figure(
            f"{name}, worst seed", float((chosen / drawn).max()), 1.0, "below 1: better in each"
        ),
    ]


def main() -> None:
    """Run all cases and write the table."""
    parser = parser_for(__doc__)
    parser.add_argument(
        "--only", choices=["mace", "nve", "next"], help="these alone, nothing written"
    )
    parser.add_argument("--fairchem", type=Path, help="a virtual environment with fairchem-core")
    options = parser.parse_args()
    os.environ["UNISONO_BACKEND"] = "shm"
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    parts = {"mace": mace, "nve": long_run, "next": next_structures}
    chosen = [parts[options.only]] if options.only else list(parts.values())
    figures = [figure for part in chosen for figure in part(options.quick)]
    table = figure_table([*figures, *fairchem(options.fairchem)])
    publish("Potentials", table, write=not (options.quick or options.only))


if __name__ == "__main__":
    main()
