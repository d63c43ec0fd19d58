"""Neighbour lists against all pairs, prediction from a plain process."""

from __future__ import annotations

import itertools
from importlib.util import find_spec

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unisono import graph_parallel as gp
from unisono.errors import PartitionError
from unisono.graph_parallel import neighbours


@pytest.fixture(params=["vesin", "torch"], autouse=True)
def search(request, monkeypatch):
    """Both ways to search; without vesin all pairs are looked at."""
    if request.param == "vesin" and find_spec("vesin") is None:
        pytest.skip("no vesin here: unisono[potentials]")
    if request.param == "torch":
        monkeypatch.setattr(neighbours, "find_spec", lambda _: None)


def brute_force(pos, cutoff, cell=None, batch=None, reach=3):
    """All pairs and images, one by one."""
    dims = pos.shape[1]
    vectors = torch.zeros(dims, dims, dtype=pos.dtype) if cell is None else cell
    found = set()
    for step in itertools.product(range(-reach, reach + 1), repeat=0 if cell is None else dims):
        shift = (torch.tensor(step or [0] * dims, dtype=pos.dtype)) @ vectors
        apart = (pos[:, None] + shift - pos[None]).norm(dim=2)
        for s, d in (apart <= cutoff).nonzero().tolist():
            if (s != d or any(step)) and (batch is None or batch[s] == batch[d]):
                found.add((s, d, *(round(v, 6) for v in shift.tolist())))
    return found


def as_set(neighbours):
    return {
        (s, d, *(round(v, 6) for v in shift))
        for (s, d), shift in zip(
            neighbours.edge_index.T.tolist(), neighbours.shifts.tolist(), strict=True
        )
    }


@settings(
    deadline=None,
    max_examples=10,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(points=st.integers(0, 20), cutoff=st.floats(0.2, 2.0), seed=st.integers(0, 999))
def test_neighbours_are_those_of_all_pairs(points, cutoff, seed):
    draw = torch.Generator().manual_seed(seed)
    pos = 3 * torch.rand(points, 3, dtype=torch.float64, generator=draw)
    batch = torch.arange(points) // 7
    assert as_set(gp.radius_graph(pos, cutoff)) == brute_force(pos, cutoff)
    assert as_set(gp.radius_graph(pos, cutoff, batch=batch)) == brute_force(
        pos, cutoff, None, batch
    )
    targets = torch.arange(0, points, 2)
    wanted = {edge for edge in brute_force(pos, cutoff) if edge[1] % 2 == 0}
    assert as_set(gp.radius_graph(pos, cutoff, targets=targets)) == wanted


@pytest.mark.parametrize("dims", [1, 2, 4, 6])
def test_neighbours_in_any_dimension(dims):
    draw = torch.Generator().manual_seed(dims)
    pos = 3 * torch.rand(40, dims, dtype=torch.float64, generator=draw)
    cutoff = 0.5 * dims
    found = gp.radius_graph(pos, cutoff)
    assert as_set(found) == brute_force(pos, cutoff)
    assert found.shifts.shape == (found.edge_index.shape[1], dims)
    if dims <= 2:
        cell = torch.tensor([[1.3, 0.2], [-0.4, 1.1]], dtype=torch.float64)[:dims, :dims]
        few = pos[:5]
        assert as_set(gp.radius_graph(few, 1.2, cell=cell)) == brute_force(few, 1.2, cell, reach=4)


@pytest.mark.parametrize("cutoff", [0.4, 1.1, 1.9])
def test_periodic_images_are_neighbours_also_of_themselves(cutoff):
    draw = torch.Generator().manual_seed(0)
    cell = torch.tensor([[1.2, 0, 0], [0.4, 1.1, 0], [-0.3, 0.2, 1.5]], dtype=torch.float64)
    pos = 2 * torch.rand(5, 3, dtype=torch.float64, generator=draw)
    assert as_set(gp.radius_graph(pos, cutoff, cell=cell)) == brute_force(pos, cutoff, cell)
    two = gp.radius_graph(
        torch.cat([pos, pos]), cutoff, cell=torch.stack([cell, cell]), batch=torch.arange(10) // 5
    )
    assert two.edge_index.shape[1] == 2 * len(brute_force(pos, cutoff, cell))


def test_cells_that_repeat_along_some_vectors_and_points_that_drifted_away():
    draw = torch.Generator().manual_seed(0)
    cell = torch.tensor([[1.2, 0, 0], [0.4, 1.1, 0], [-0.3, 0.2, 1.5]], dtype=torch.float64)
    pos = 2 * torch.rand(6, 3, dtype=torch.float64, generator=draw)
    for pbc in ((True, False, False), (False, True, True), (False, False, False)):
        open_cell = cell * torch.tensor(pbc)[:, None]  # vectors that do not repeat may be zero
        wanted = brute_force(pos, 1.1, open_cell)
        wanted = {(s, d, *shift) for s, d, *shift in wanted if s != d or any(shift)}
        for given_cell in (cell, open_cell):
            found = gp.radius_graph(pos, 1.1, cell=given_cell, pbc=pbc)
            assert as_set(found) == wanted
            assert found.edge_index.shape[1] == len(wanted), "each once"
    steps = torch.randint(-50, 50, (6, 3), generator=draw).double()
    apart = []
    for where in (pos, pos + steps @ cell):
        found = gp.radius_graph(where, 1.9, cell=cell, targets=torch.tensor([4, 1]))
        source, target = found.edge_index
        vectors = where[target] - where[source] - found.shifts
        rows = torch.cat([found.edge_index.T.double(), vectors], 1)
        apart.append(sorted(tuple(round(v, 6) + 0.0 for v in row) for row in rows.tolist()))
    assert apart[0] == apart[1]
    assert set(target.tolist()) == {1, 4}


def test_a_point_far_away_is_alone_and_changes_nothing_else():
    pos = torch.tensor([[0.0, 0, 0], [0.3, 0, 0], [1e9, -1e9, 1e9]], dtype=torch.float64)
    assert gp.radius_graph(pos, 0.5).edge_index.tolist() == [[1, 0], [0, 1]]
    assert gp.radius_graph(pos, 0.5, batch=[0, 7, 7]).edge_index.shape == (2, 0)


class SumOfNeighbours(torch.nn.Module):
    """Energies and forces of a graph shared by all ranks of the row."""

    def forward(self, batch):
        pos, edges = batch["pos"], batch["edges"]
        part = gp.GraphPartition.contiguous(len(pos), gp.get_gp_world_size())
        plan = gp.GraphPlan(part, edges)
        mine = plan.scatter(pos).requires_grad_()
        term = plan.message_pass(mine, lambda a, b, _: (a - b) ** 2).sum()
        (force,) = torch.autograd.grad(term, mine, create_graph=True)
        energy, forces = plan.reduce(term, grad="identity"), plan.gather(force, grad="slice")
        return {"out": gp.Prediction(energy, forces, None), "ranks": gp.get_gp_world_size()}


def test_prediction_of_one_big_system_from_a_plain_process():
    pos = torch.randn(9, 3, dtype=torch.float64)
    edges = gp.radius_graph(pos, 1.5).edge_index
    batch = {"pos": pos, "edges": edges}
    found = gp.parallel_predict(SumOfNeighbours(), batch, workers=2)
    assert found["ranks"] == 2
    alone = SumOfNeighbours()(batch)["out"]
    for ours, theirs in ((found["out"].energy, alone.energy), (found["out"].forces, alone.forces)):
        assert not ours.requires_grad
        torch.testing.assert_close(ours, theirs.detach())


def test_targets_and_batches_may_be_lists():
    pos = torch.tensor([[0.0, 0, 0], [1, 0, 0], [2, 0, 0]])
    whole = gp.radius_graph(pos, 1.5, targets=[2], batch=[0, 0, 0]).edge_index
    assert whole.tolist() == [[1], [2]]
    assert gp.radius_graph(pos, 1.5, targets=[]).edge_index.shape == (2, 0)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"pos": torch.zeros(4)}, r"\[N, D\]"),
        ({"pos": torch.zeros(4, 0)}, r"\[N, D\]"),
        ({"pos": torch.zeros(4, 2, dtype=torch.int64)}, r"\[N, D\]"),
        ({"pos": torch.full((1, 3), float("nan"))}, "point 0"),
        ({"cutoff": 0.0}, "cutoff > 0"),
        ({"cell": torch.eye(2)}, r"\[2, 2\] for points in 3 dim[\s\S]*\[3, 3\]"),
        ({"cell": torch.zeros(3, 3)}, "no volume"),
        ({"cell": torch.eye(3) * torch.nan}, "nan or infinity"),
        ({"cell": torch.eye(3), "pbc": (True, True)}, "2 entries for 3 vectors"),
        ({"targets": torch.tensor([0, 9])}, r"targets\[1\] = 9"),
        ({"targets": torch.tensor([False, False, True])}, r"torch\.bool(.|\n)*HINT: .*nonzero"),
        ({"targets": torch.tensor([1.9])}, r"torch\.float32"),
        ({"targets": [1.9]}, r"torch\.float32"),
        ({"targets": torch.tensor(1)}, r"shape \[\]"),
        ({"targets": "all"}, "'all'"),
        ({"batch": torch.tensor([0, 0, 0.5])}, r"torch\.float32"),
        ({"batch": torch.tensor([0, 1])}, "2 != 3"),
        ({"batch": torch.tensor([0, 0, -1])}, r"batch\[2\] = -1"),
        ({"batch": torch.zeros(3, 1, dtype=torch.int64)}, r"shape \[3, 1\]"),
    ],
)
def test_what_radius_graph_cannot_take_is_refused(wrong, words):
    with pytest.raises(PartitionError, match=words):
        gp.radius_graph(**{"pos": torch.zeros(3, 3), "cutoff": 1.5, **wrong})
