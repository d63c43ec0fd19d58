"""Error bars of energies and forces: exact regression, one process, and what EMT computes."""

from __future__ import annotations

import copy
import pickle
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch import Tensor

from unisono.bayes import EnergyHead, metric
from unisono.comm import world
from unisono.errors import PartitionError
from unisono.graph_parallel import radius_graph

NOISE = 0.1
"""Of energies, in parts of their spread: what `learn` is told by default."""


def chains(count, seed=0, features=6):
    """Features `[atoms, features]` of structures of 3 to 6 atoms, their numbers, and energies."""
    draw = torch.Generator().manual_seed(seed)
    sizes = torch.randint(3, 7, (count,), generator=draw)
    structure = torch.arange(count).repeat_interleave(sizes)
    mixing = torch.randn(features, features, generator=torch.Generator().manual_seed(1)).double()
    rows = torch.randn(len(structure), features, generator=draw).double() @ mixing + 0.5
    weights = torch.linspace(-1, 1, features).double()
    energy = torch.zeros(count).double().index_add(0, structure, rows @ weights - 2)
    return rows, structure, energy + 0.5 * torch.randn(count, generator=draw).double()


def exact_weights(rows, structure, energy, prior=10.0):
    """Mean and covariance of the weights, and the offsets, by Bayesian linear regression."""
    atoms = torch.bincount(structure).double()
    x = torch.zeros(len(atoms), rows.shape[1]).double().index_add(0, structure, rows)
    x, y = x / atoms[:, None], energy / atoms
    offset, level, spread = x.mean(0), y.mean(), y.std(correction=0)
    x, y = x - offset, (y - level) / spread
    scale = torch.linalg.eigvalsh(x.T @ x / len(x))[-1].sqrt()
    precision = x.T @ x / NOISE**2 + torch.eye(len(offset)).double() * (scale / prior) ** 2
    covariance = torch.linalg.inv(precision)
    mean = covariance @ x.T @ y / NOISE**2
    return spread * mean, spread**2 * covariance, offset, level


def test_energies_and_forces_have_the_error_bars_of_exact_regression():
    examples = chains(60)
    head = EnergyHead(6)
    head.learn(*examples)
    mean, covariance, offset, level = exact_weights(*examples)
    rows, structure, _ = chains(20, seed=5)
    atoms = torch.bincount(structure).double()
    sums = torch.zeros(20, 6).double().index_add(0, structure, rows) - atoms[:, None] * offset
    energy, std = head(rows, structure)
    assert (energy - sums @ mean - atoms * level).abs().max() < 0.02 * energy.std()
    ratio = std / ((sums @ covariance) * sums).sum(1).sqrt()
    assert ratio.min() > 0.97
    assert ratio.max() < 1.06

    pos = torch.rand(5, 3, dtype=torch.float64, requires_grad=True)
    mixing = torch.linspace(-2, 2, 18).double().reshape(3, 6)

    def features(at):
        return torch.sin(at @ mixing)

    force, spread = head.forces(features(pos), pos)
    slopes = torch.autograd.functional.jacobian(lambda at: features(at).sum(0), pos)
    assert torch.allclose(force, -torch.einsum("fni,f->ni", slopes, mean), rtol=0.02, atol=1e-2)
    exact = torch.einsum("fni,fg,gni->ni", slopes, covariance, slopes).sqrt()
    assert ((spread / exact - 1).abs() < 0.06).all()
    (slope,) = torch.autograd.grad(head(features(pos))[0].sum(), pos)
    assert torch.allclose(force, -slope)


def test_atoms_share_the_weights_so_that_two_copies_have_twice_the_error_bar():
    head = EnergyHead(6)
    rows, structure, energy = chains(40)
    head.learn(rows, structure, energy)
    crystal = rows[:7]
    energy, std = head(crystal)
    doubled, wide = head(torch.cat([crystal, crystal]))
    assert torch.allclose(doubled, 2 * energy)
    assert torch.allclose(wide, 2 * std), "independent atoms would give the root of two"
    alone = torch.cat([head(atom[None])[1] for atom in crystal])
    assert (alone.square().sum().sqrt() / std).item() != pytest.approx(1, abs=0.1)
    assert torch.allclose(head(crystal.flip(0))[1], std)


@pytest.mark.ranks([2, 3])
def test_ranks_with_structures_of_their_own_learn_what_one_process_does():
    comm = world()
    rows, structure, energy = chains(25)
    owners = torch.tensor([*[0, 2, 22][: comm.size], 25])  # rank 0 has two
    first, last = owners[comm.rank : comm.rank + 2].tolist()
    mine = (structure >= first) & (structure < last)
    together, alone = EnergyHead(6), EnergyHead(6)
    options = {"epochs": 10, "noise": 0.2}
    together.learn(rows[mine], structure[mine] - first, energy[first:last], **options)
    one = comm.split(comm.rank)
    alone.learn(rows, structure, energy, batch_size=comm.size, comm=one, **options)
    for ours, theirs in zip(together(rows, structure), alone(rows, structure), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-9)


@pytest.mark.ranks(2)
def test_a_mistake_of_one_rank_is_an_error_on_all():
    rows, structure, energy = chains(6)
    energy[3] = torch.nan if world().rank else 0.0
    with pytest.raises(PartitionError, match=r"rank 1 of 2[\s\S]*energy"):
        EnergyHead(6).learn(rows, structure, energy)


@pytest.mark.parametrize(
    ("change", "number"),
    [
        (lambda rows, structure, energy: (rows[:, :4], structure, energy), 4),
        (lambda rows, structure, energy: (rows, structure[1:], energy), "!="),
        (lambda rows, structure, energy: (rows, structure + 1, energy), "structure 0"),
        (lambda rows, structure, energy: (rows, structure, energy[1:]), "5 != 6"),
        (lambda rows, structure, energy: (rows / 0, structure, energy), "features"),
        (lambda rows, structure, energy: (rows[structure < 1], None, energy[:1]), "1 structures"),
    ],
)
def test_examples_that_do_not_fit_are_refused(change, number):
    with pytest.raises(PartitionError, match=str(number)):
        EnergyHead(6).learn(*change(*chains(6)))


def test_a_head_that_has_learnt_nothing_predicts_nothing_and_copies_keep_what_was_learnt():
    head = EnergyHead(6)
    rows, structure, energy = chains(12)
    with pytest.raises(PartitionError, match="learn"):
        head(rows, structure)
    head.learn(rows, structure, energy, epochs=2)
    head.noise = 0.3
    for other in (copy.deepcopy(head), pickle.loads(pickle.dumps(head))):
        for ours, theirs in zip(head(rows, structure), other(rows, structure), strict=True):
            assert torch.equal(ours, theirs)


# -- a potential -----------------------------------------------------------------------------------


def densities(pos: Tensor, cell: Tensor) -> Tensor:
    """Features that nobody trained: shells of neighbours, also through a random layer."""
    centres = torch.linspace(1.8, 5, 12, dtype=torch.float64)
    draw = torch.Generator().manual_seed(0)
    layer, bias = torch.randn(12, 32, generator=draw), torch.randn(32, generator=draw)
    (source, target), shifts = radius_graph(pos.detach(), 5.0, cell=cell)
    apart = (pos[target] - pos[source] - shifts).norm(dim=1, keepdim=True)
    near = torch.exp(-(((apart - centres) / 0.35) ** 2)) * torch.cos(torch.pi * apart / 10) ** 2
    shells = near.new_zeros(len(pos), 12).index_add(0, target, near)
    return torch.cat([shells, torch.tanh(shells @ layer.double() / 2 + bias)], 1)


def copper(rng, strain):
    """Eight atoms, shaken, in a cell that is stretched by so much; energy and forces of EMT."""
    from ase.build import bulk
    from ase.calculators.emt import EMT

    atoms = bulk("Cu", cubic=True) * (2, 1, 1)
    atoms.set_cell(atoms.cell.array * (1 + strain), scale_atoms=True)
    atoms.rattle(rng.uniform(0.02, 0.12), rng=rng)
    atoms.calc = EMT()
    pos = torch.tensor(atoms.positions, requires_grad=True)
    rows = densities(pos, torch.tensor(atoms.cell.array))
    return rows, pos, atoms.get_potential_energy(), atoms.get_forces()


def stacked(crystals):
    rows = torch.cat([rows for rows, *_ in crystals])
    structure = torch.arange(len(crystals)).repeat_interleave(8)
    return rows, structure, [energy for _, _, energy, _ in crystals]


@pytest.mark.skipif(find_spec("ase") is None, reason='no ASE here: pip install "unisono[bench]"')
@pytest.mark.timeout(180)
def test_ninety_percent_intervals_hold_ninety_percent_and_widen_outside_of_the_training_range():
    rng = np.random.default_rng(0)
    crystals = [copper(rng, rng.uniform(-0.04, 0.04)) for _ in range(310)]
    head = EnergyHead(44)
    head.learn(*stacked(crystals[:80]), epochs=20)
    head.calibrate(*stacked(crystals[80:150]))
    rows, structure, truth = stacked(crystals[150:])
    energy, std = (t.detach().numpy() for t in head(rows, structure))
    assert 0.86 <= metric.coverage(energy, std, truth, 0.9) <= 0.94
    assert metric.rmse(energy, truth) < 0.15 * np.std(truth)
    outside = stacked([copper(rng, strain) for strain in np.linspace(0.1, 0.14, 10)])
    assert head(*outside[:2])[1].min() > 2 * np.median(std)

    inside = 0
    for rows, pos, _, forces in crystals[150:170]:
        force, spread = (t.numpy() for t in head.forces(rows, pos))
        inside += metric.coverage(force, spread, forces, 0.9) / 20
    assert inside >= 0.7, "of forces; none was learnt"
