"""A calculator on ranks that stay: what one process says, moving atoms, batches, and the end."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from tests.graph_parallel.potentials import crystal
from tests.waiting import is_running
from torch import nn

from unisono import graph_parallel as gp
from unisono.errors import MissingExtra, PartitionError, RankFailed
from unisono.graph_parallel import Adapter, GraphPartition

needs_ase = pytest.mark.skipif(find_spec("ase") is None, reason="no ASE here: unisono[potentials]")
LENGTH = 4.2


class Embedded(nn.Module):
    """Pairs that repel, and a density in which atoms sink: two layers, no weights to train."""

    def density(self, piece) -> torch.Tensor:
        apart = piece.vectors.norm(dim=1)
        near = (1 - apart / LENGTH) ** 3 * torch.exp(-apart)
        return piece.vectors.new_zeros(piece.own).index_add(0, piece.edge_index[1], near)

    def forward(self, piece) -> torch.Tensor:
        source, target = piece.edge_index
        apart = piece.vectors.norm(dim=1)
        density = self.density(piece)
        pair = 40 * (1 - apart / LENGTH) ** 3 * torch.exp(-2 * apart)
        pair = pair * (1 + 0.1 * piece.extend(density[:, None])[source, 0])
        energy = piece.vectors.new_zeros(piece.own).index_add(0, target, pair)
        return energy - 3 * torch.sqrt(density + 1e-3)


ADAPTER = Adapter(lambda model, piece: model(piece), lambda model: LENGTH, lambda model: [13, 29])


def by_one(atoms: Any) -> dict[str, np.ndarray]:
    """What a world of one rank says."""
    part = GraphPartition.contiguous(len(atoms), 1)
    pos, numbers = torch.tensor(atoms.positions), torch.tensor(atoms.numbers)
    out = gp.split_potential(Embedded(), part, adapter=ADAPTER)(
        pos,
        numbers,
        cell=torch.tensor(atoms.cell.array),
        pbc=[bool(p) for p in atoms.pbc],
        stress=bool(atoms.pbc.all()),
    )
    return {
        "energy": out.energy.item(),
        "forces": out.forces.detach().numpy(),
        "stress": None if out.stress is None else out.stress.detach().numpy(),
    }


@pytest.fixture(scope="module")
def shared() -> Iterator[Any]:
    if find_spec("ase") is None:
        pytest.skip("no ASE here: unisono[potentials]")
    with gp.Calculator(Embedded(), ranks=2, adapter=ADAPTER) as calculator:
        yield calculator


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As ranks have it: threads of a busy machine wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pids_of(calculator: Any) -> list[int]:
    return [rank.pid for rank in calculator._team._job._launch._supervisor.ranks._ranks]


def test_energy_forces_stress_and_hessian_are_those_of_one_process(shared):
    atoms = crystal(3)
    atoms.calc = shared
    wanted = by_one(atoms)
    assert abs(atoms.get_potential_energy() - wanted["energy"]) < 1e-9
    assert np.abs(atoms.get_forces() - wanted["forces"]).max() < 1e-9
    assert np.abs(atoms.get_stress(voigt=False) - wanted["stress"]).max() < 1e-9
    assert abs(wanted["forces"]).max() > 0.1
    few = crystal((3, 2, 2))
    found = shared.get_hessian(few)
    step = 1e-4
    for place in (0, 77):  # a column each, by differences
        pulls = []
        for sign in (1, -1):
            few.positions.flat[place] += sign * step
            pulls.append(by_one(few)["forces"].reshape(-1))
            few.positions.flat[place] -= sign * step
        column = (pulls[1] - pulls[0]) / (2 * step)
        assert np.abs(found[:, place] - column).max() < 1e-5
    assert np.abs(found - found.T).max() < 1e-9


@pytest.mark.timeout(300)
def test_molecular_dynamics_keeps_the_energy_while_atoms_move_between_ranks(shared):
    from ase import units
    from ase.md.verlet import VelocityVerlet

    def energies(calculator):
        atoms = crystal((3, 2, 2))
        atoms.calc = calculator
        rng = np.random.RandomState(3)
        atoms.set_velocities(0.02 * rng.standard_normal((len(atoms), 3)) + [0.15, 0, 0])
        motion = VelocityVerlet(atoms, 4 * units.fs)
        found = [atoms.get_total_energy() for _ in motion.irun(100)]
        return found, atoms

    class One:
        """Just enough of a calculator, in this process."""

        def get_potential_energy(self, atoms, force_consistent=False):
            return by_one(atoms)["energy"]

        def get_forces(self, atoms):
            return by_one(atoms)["forces"]

    shared.evaluate([crystal((3, 2, 2))])
    before = pids_of(shared)
    ours, atoms = energies(shared)
    assert np.ptp(ours) < 2e-2 * abs(ours[0])
    assert pids_of(shared) == before, "the same ranks, without a restart"
    assert (atoms.positions[:, 0].max() - atoms.cell[0, 0]) > 2.0, "atoms drift out of the cell"
    alone, one_process = energies(One())
    assert np.abs(np.array(alone) - ours).max() < 1e-8
    assert np.abs(one_process.positions - atoms.positions).max() < 1e-8
    wanted = by_one(atoms)
    assert abs(atoms.get_potential_energy() - wanted["energy"]) < 1e-9
    # another number of atoms, on the same ranks
    more = crystal((4, 3, 3))
    assert abs(shared.evaluate([more])[0]["energy"] - by_one(more)["energy"]) < 1e-9


def test_many_small_systems_are_dealt_out_whole_and_a_large_one_is_split(shared):
    from unisono.graph_parallel.calculator import deal

    assert deal([4] * 9, 3).count(None) == 0
    assert sorted(deal([4] * 9, 3)) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert deal([108], 3) == [None]
    assert deal([3], 3) == [0], "too small to be split"
    assert deal([4, 900, 4], 2)[1] is None
    systems = [crystal((n, 1, 1), pbc=n % 2 == 0) for n in (1, 2, 3, 4, 5)] + [crystal(3)]
    for atoms, found in zip(systems, shared.evaluate(systems), strict=True):
        wanted = by_one(atoms)
        assert abs(found["energy"] - wanted["energy"]) < 1e-9
        assert np.abs(found["forces"] - wanted["forces"]).max() < 1e-9
    assert shared.evaluate([]) == []


def test_what_cannot_be_computed_is_refused_and_the_ranks_stay(shared):
    from ase import Atoms
    from ase.calculators.calculator import PropertyNotImplementedError

    shared.evaluate([crystal(1)])
    before = pids_of(shared)
    broken = crystal(1)
    broken.positions[2] = np.nan
    with pytest.raises(PartitionError, match=r"atom 2 is at \[nan"):
        shared.evaluate([broken])
    with pytest.raises(PartitionError, match="without atoms"):
        shared.evaluate([Atoms()])
    with pytest.raises(PartitionError, match=r"unknown: \[1\]"):
        shared.evaluate([Atoms("H")])
    with pytest.raises(PartitionError, match=r"atoms.pbc = False"):
        shared.evaluate([Atoms("Al", pbc=True)])
    with pytest.raises(PropertyNotImplementedError, match="not periodic"):
        shared.evaluate([crystal(1, pbc=False)], ["stress"])
    with pytest.raises(PropertyNotImplementedError, match="dipole"):
        shared.evaluate([crystal(1)], ["dipole"])
    assert pids_of(shared) == before


@needs_ase
def test_a_rank_that_dies_is_one_error_and_ranks_end_with_the_calculator():
    atoms = crystal(3)
    atoms.calc = gp.Calculator(Embedded(), ranks=2, adapter=ADAPTER)
    energy = atoms.get_potential_energy()
    pids = pids_of(atoms.calc)
    os.kill(pids[1], signal.SIGKILL)
    atoms.rattle(1e-9)
    with pytest.raises(RankFailed, match="SIGKILL"):
        atoms.get_potential_energy()
    assert abs(atoms.get_potential_energy() - energy) < 1e-6, "the next call starts new ones"
    pids += pids_of(atoms.calc)
    atoms.calc = None
    gc.collect()
    assert not any(is_running(pid) for pid in pids)


def test_without_ase_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ase.calculators.calculator", None)
    monkeypatch.delitem(sys.modules, "unisono.graph_parallel.calculator", raising=False)
    with pytest.raises(MissingExtra, match=r"unisono\[potentials\]"):
        _ = gp.Calculator
