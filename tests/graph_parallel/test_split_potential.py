"""Potentials that others wrote, on atoms that ranks share: everything equals one process."""

from __future__ import annotations

import pytest
import torch
from tests.graph_parallel.potentials import (
    by_mace,
    crystal,
    mace_model,
    needs_mace,
    tensors_of,
)

from unisono import graph_parallel as gp
from unisono.comm import world
from unisono.errors import PartitionError
from unisono.graph_parallel import GraphPartition
from unisono.testing import RankPool

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # e3nn scripts its code


def assert_equal(ours, theirs, scale=1.0):
    apart = float((ours - theirs).detach().abs().max())
    assert apart <= 1e-9 * max(scale, float(theirs.detach().abs().max())), apart


def loss_of(energy, forces, stress):
    loss = (energy / 10 + 1) ** 2 + (forces - 0.1).square().sum()
    return loss if stress is None else loss + 100 * (stress - 0.01).square().sum()


def direction(atoms):
    return torch.linspace(-1, 1, 3 * len(atoms), dtype=torch.float64).view(-1, 3)


def plain(model, atoms):
    """Energy, forces, stress, a Hessian-vector product, and gradients of a loss on all of them."""
    energy, forces, stress, pos = by_mace(model, atoms, bool(atoms.pbc.all()))
    (bent,) = torch.autograd.grad((forces * direction(atoms)).sum(), pos, retain_graph=True)
    grads = torch.autograd.grad(
        loss_of(energy, forces, stress), list(model.parameters()), allow_unused=True
    )
    return energy, forces, stress, bent, grads


def compare(model, atoms, size, wanted):
    """The same by the first `size` ranks; returns the potential they share."""
    energy, forces, stress, bent, grads = wanted
    given = tensors_of(atoms)
    with gp.use_groups(gp.graph_groups(size, comm=world().sub(range(size)))):
        split = gp.split_potential(model, GraphPartition.morton(given["pos"], size))
        split.zero_grad()
        pos = given["pos"].requires_grad_()
        out = split(**given, stress=stress is not None)
        turned = (out.forces * direction(atoms)).sum()
        (found,) = torch.autograd.grad(turned, pos, retain_graph=True)
        loss_of(out.energy, out.forces, out.stress).backward()
        gp.sync_gradients(split)
    for ours, theirs in ((out.energy, energy), (out.forces, forces), (found, bent)):
        assert_equal(ours, theirs)
    if stress is not None:
        assert_equal(out.stress, stress)
    scale = max(float(grad.abs().max()) for grad in grads if grad is not None)
    for weight, grad in zip(model.parameters(), grads, strict=True):
        if grad is None:
            assert weight.grad is None or not weight.grad.any()
        else:
            assert_equal(weight.grad, grad, scale)
    assert not any("handle_lammps" in vars(layer) for layer in model.interactions)
    return split


@pytest.fixture(scope="module")
def ranks_with_mace(rank_pool):
    """Ranks forked from a process that has loaded MACE, which takes a while."""
    with RankPool(preload=["mace.data", "mace.modules", "mace.tools"]) as pool:
        pool.by_value = rank_pool.by_value
        yield pool


@needs_mace
@pytest.mark.timeout(300)
def test_energy_forces_stress_and_a_loss_on_all_of_them_equal_plain_mace(ranks_with_mace):
    ranks_with_mace.run(compare_all, world=4, timeout=240)


def compare_all():
    rank = world().rank
    model = mace_model()
    block = crystal((3, 2, 2))
    wanted = plain(model, block)
    for size in (2, 3, 4):
        if rank < size:
            plan = compare(model, block, size, wanted).plan
            assert plan.edge_index.shape[1] < plan.stats.edges_total, "no rank holds all edges"
    slab = crystal((2, 2, 1), pbc=(True, True, False))
    slab.positions[:, 2] += 40.0
    if rank < 3:
        compare(model, slab, 3, plain(model, slab))
    # The cutoff is longer than the cell, so atoms see images of themselves.
    skewed = crystal((2, 1, 1), cell=[[6.9, 0.5, 0.0], [1.4, 3.7, 0.2], [-0.6, 0.9, 3.5]])
    compare(model, skewed, 4, plain(model, skewed))
    cluster = crystal((1, 1, 1), pbc=False)[:3]  # fewer atoms than ranks
    compare(model, cluster, 4, plain(model, cluster))


@needs_mace
@pytest.mark.timeout(300)
def test_other_kinds_of_mace_are_split_as_well(ranks_with_mace):
    ranks_with_mace.run(compare_rich, world=2, timeout=240)


def compare_rich():
    rich = mace_model(
        "MACE",
        interaction_cls="RealAgnosticDensityResidualInteractionBlock",
        interaction_cls_first="RealAgnosticResidualInteractionBlock",
        pair_repulsion=True,
        distance_transform="Agnesi",
        num_interactions=3,
    )
    atoms = crystal((2, 2, 1))
    compare(rich, atoms, 2, plain(rich, atoms))


@pytest.mark.ranks(3)
def test_what_a_potential_cannot_take_is_refused_on_all_ranks_alike():
    comm = world()
    pair = gp.Adapter(
        energies=lambda model, piece: model(piece.vectors.norm(dim=1, keepdim=True)),
        cutoff=lambda _: 1.0,
        elements=lambda _: [1, 8],
    )
    pos, numbers = torch.rand(5, 3, dtype=torch.float64), torch.full((5,), 8)
    model = torch.nn.Linear(1, 1).double()
    split = gp.split_potential(
        model, GraphPartition.morton(pos, comm.size), adapter=pair, comm=comm
    )
    holes = pos.clone()
    holes[3, 1] = torch.nan
    flat = torch.zeros(3, 3)
    for words, call in {
        "point 3 is at": lambda: split(holes, numbers),
        r"\[4, 3\] and \[5\]|expected \[5, 3\]": lambda: split(pos[:4], numbers),
        r"unknown: \[6\]": lambda: split(pos, torch.full((5,), 6)),
        "without a volume": lambda: split(pos, numbers, stress=True),
        "span no volume": lambda: split(pos, numbers, cell=flat),
        "Linear[\\s\\S]*adapter=Adapter": lambda: gp.split_potential(
            model, split.partition, comm=comm
        ),
    }.items():
        with pytest.raises(PartitionError, match=words):
            call()
        comm.barrier()  # nobody is left behind in a collective
    split.partition = GraphPartition.from_owner([2, 2, 2, 2, 2], comm.size)  # two without atoms
    assert split(pos, numbers).forces.shape == (5, 3)
    far = pos + torch.tensor([[0.0], [7], [-14], [700], [0]]).double() * torch.eye(3)[0]
    cell = 7 * torch.eye(3, dtype=torch.float64)
    inside, outside = (split(where, numbers, cell=cell) for where in (pos, far))
    assert_equal(inside.forces, outside.forces)


@pytest.mark.ranks(2)
def test_neighbours_are_kept_until_an_atom_has_moved_half_of_the_skin():
    comm = world()
    pair = gp.Adapter(
        energies=lambda model, piece: model(1 / piece.vectors.norm(dim=1, keepdim=True)),
        cutoff=lambda _: 1.5,
    )
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1).double()
    pos, numbers = 4 * torch.rand(30, 3, dtype=torch.float64), torch.ones(30, dtype=torch.int64)
    part, cell = GraphPartition.morton(pos, comm.size), 4 * torch.eye(3, dtype=torch.float64)
    kept = gp.split_potential(model, part, adapter=pair, skin=0.4, comm=comm)
    exact = gp.split_potential(model, part, adapter=pair, comm=comm)
    plans, away = [], torch.nn.functional.normalize(pos - 2)
    for _ in range(6):
        ours, theirs = (split(pos, numbers, cell=cell, stress=True) for split in (kept, exact))
        for name in ("energy", "forces", "stress"):
            assert_equal(getattr(ours, name), getattr(theirs, name))
        plans.append(kept.plan)
        pos = pos + 0.08 * away  # the third step is beyond 0.2
    assert plans[0] is plans[1] is plans[2] is not plans[3]
    assert plans[3] is plans[5]
    wider = kept(pos, numbers, cell=1.1 * cell).energy
    assert_equal(wider, exact(pos, numbers, cell=1.1 * cell).energy)
