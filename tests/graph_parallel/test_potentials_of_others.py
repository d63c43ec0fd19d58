"""Models of other packages, with random weights: split by their own forward, as in one process.

matgl and SevenNet need packages that exclude MACE's. Each is installed into a folder of its own
below `POTENTIALS`, if that names one, and seen by ranks that only this test uses.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.graph_parallel.test_split_potential import loss_of

import unisono
from unisono import graph_parallel as gp
from unisono.comm import world
from unisono.errors import PartitionError
from unisono.graph_parallel import GraphPartition, adapters
from unisono.testing import RankPool

CUTOFF = 2.0
SEPARATE = {
    "matgl": ["matgl", "pymatgen-core", "monty", "ruamel.yaml", "tabulate"],
    "sevenn": ["sevenn", "e3nn", "braceexpand"],
}
"""What each package needs that is not here, or is here in another version."""


def of_pyg(name):
    """A model of torch_geometric, how it is called on known edges, and its adapters."""
    from torch_geometric.nn import models

    options = {
        "ViSNet": {"lmax": 1, "hidden_channels": 8, "num_heads": 2, "num_layers": 1, "num_rbf": 6},
        "SchNet": {"hidden_channels": 8, "num_filters": 8, "num_interactions": 2,
                   "num_gaussians": 6, "readout": "add"},
        "DimeNetPlusPlus": {"hidden_channels": 8, "out_channels": 1, "num_blocks": 1,
                            "int_emb_size": 4, "basis_emb_size": 4, "out_emb_channels": 8,
                            "num_spherical": 2, "num_radial": 3, "max_num_neighbors": 99},
    }  # fmt: skip
    model = getattr(models, name)(cutoff=CUTOFF, **options[name])
    if name == "DimeNetPlusPlus":  # its last layer starts at zero
        for block in model.output_blocks:
            torch.nn.init.normal_(block.lin.weight)
    if name == "SchNet":  # by hooks, and by its forward
        ways = [None, adapters.by_forward(lambda m: m.cutoff, lambda m: m.num_interactions)]
    else:
        ways = [None]

    def call(numbers, pos, edges, graph):
        with adapters.known_edges(model, edges):
            out = model(numbers, pos, graph)
        return out[0] if isinstance(out, tuple) else out

    return model, call, ways


def of_matgl(name):
    """A model of matgl, and how it is called."""
    import matgl
    from matgl import models

    matgl.set_default_dtype("float", 64)

    options = {
        "TensorNet": {"units": 8, "nblocks": 1, "num_rbf": 4, "rbf_type": "Gaussian"},
        "M3GNet": {"units": 8, "nblocks": 1, "threebody_cutoff": 1.6, "max_n": 2, "max_l": 2},
        "CHGNet": {"threebody_cutoff": 1.6, "num_blocks": 2, "max_n": 3, "max_f": 2,
                   "dim_atom_embedding": 8, "dim_bond_embedding": 8, "dim_angle_embedding": 8},
    }  # fmt: skip
    model = getattr(models, name)(
        element_types=("H", "C", "O"), cutoff=CUTOFF, is_intensive=False, **options[name]
    )

    def call(numbers, pos, edges, graph):
        kinds = (numbers[:, None] == torch.tensor([1, 6, 8])).long().argmax(1)
        data = SimpleNamespace(
            node_type=kinds, pos=pos, edge_index=edges, batch=graph, num_graphs=2,
            num_nodes=len(pos), pbc_offshift=None, pbc_offset=pos.new_zeros(edges.shape[1], 3),
        )  # fmt: skip
        return model(data)

    return model, call, [None]


def of_sevenn(name):
    """A SevenNet, and the energies of its atoms."""
    from sevenn import _const, model_build

    config = {
        **_const.DEFAULT_E3_EQUIVARIANT_MODEL_CONFIG, "cutoff": CUTOFF, "channel": 4,
        "lmax": 1, "num_convolution_layer": 2, "_number_of_species": 3, "shift": -0.2, "scale": 1.3,
        "_type_map": {1: 0, 6: 1, 8: 2}, "conv_denominator": 4.0, "version": "0",
        "is_train_shift_scale": False, "weight_nn_hidden_neurons": [8],
    }  # fmt: skip
    model = model_build.build_E3_equivariant_model(config)

    def call(numbers, pos, edges, graph):
        data = {
            "x": numbers, "atomic_numbers": numbers, "pos": pos, "edge_index": edges,
            "edge_vec": pos[edges[1]] - pos[edges[0]], "batch": graph,
            "num_atoms": torch.bincount(graph),
        }  # fmt: skip
        data = model._preprocess(data)
        for name, part in model.named_children():
            if name != "force_output":
                data = part(data)
        energy = data["atomic_energy"][:, 0]
        return energy.new_zeros(2).index_add(0, graph, energy)

    return model, call, [None]


def alone(call, numbers, pos, cell, strain):
    """What the model says of all atoms, their images and all edges, in one process."""
    copies = torch.arange(-2, 3) if cell is not None else torch.zeros(1)
    steps = torch.cartesian_prod(copies, copies, copies)
    steps = steps[steps.abs().sum(1).argsort(stable=True)]  # the atoms themselves first
    shifts = steps.to(pos) @ (torch.zeros(3, 3) if cell is None else cell)
    everywhere = (pos + shifts[:, None]).reshape(-1, 3) @ (torch.eye(3) + strain)
    still = everywhere.detach()
    apart = torch.cdist(still, still, compute_mode="donot_use_mm_for_euclid_dist")
    edges = ((apart <= CUTOFF) & (apart > 0)).nonzero().T
    graph = (torch.arange(len(everywhere)) >= len(pos)).long()
    return call(numbers.repeat(len(steps)), everywhere, edges, graph).reshape(-1)[0]


def compare(make, name, folder=None):
    """Energy, forces, stress and gradients of a loss of all, on 1, 2, 3 and 4 ranks."""
    sys.path[:0] = [] if folder is None else [folder]
    dtype = torch.float32 if name == "SevenNet" else torch.float64  # it knows no other
    torch.set_default_dtype(dtype)  # some make zeros of the default dtype
    try:
        torch.manual_seed(0)
        model, call, ways = make(name)
        model = model.to(dtype)
        pos = 3.2 * torch.rand(7, 3, generator=torch.Generator().manual_seed(1))
        numbers = torch.tensor([1, 8, 8, 8, 8, 8, 6])  # elements that one rank alone has
        skewed = torch.tensor([[3.3, 0, 0], [0.4, 3.1, 0], [0, -0.3, 3.5]])
        agree(model, call, ways, pos, numbers, skewed)
        if name != "ViSNet":  # whose own gradients are NaN for an atom without neighbours
            pos, numbers = (
                torch.cat([pos, torch.full((1, 3), 50.0)]),
                torch.cat([numbers, numbers[:1]]),
            )
        agree(model, call, ways, pos, numbers, None)
    finally:
        torch.set_default_dtype(torch.float32)


def assert_equal(ours, theirs, scale=1.0):
    rounding = 1e-9 if theirs.dtype == torch.float64 else 2e-5
    apart = float((ours - theirs).detach().abs().max())
    assert apart <= rounding * max(scale, float(theirs.detach().abs().max())), apart


def agree(model, call, ways, pos, numbers, cell):
    at = pos.clone().requires_grad_()
    strain = torch.zeros(3, 3, requires_grad=True)
    energy = alone(call, numbers, at, cell, strain)
    forces, virial = torch.autograd.grad(energy, (at, strain), create_graph=True)
    stress = None if cell is None else (virial + virial.T) / 2 / torch.linalg.det(cell)
    loss = loss_of(energy, -forces, stress)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    gradients = torch.autograd.grad(loss, weights, allow_unused=True)
    assert max(float(g.abs().max()) for g in gradients if g is not None) > 1e-6
    for size, adapter in itertools.product((1, 2, 3, 4), ways):
        if world().rank >= size:
            continue
        owner = torch.tensor([0, 1, 1, 2, 2, 1, 3, 0])[: len(pos)].clamp(max=size - 1)
        if size == 4:
            owner[owner == 2] = 1  # one without atoms
        part = GraphPartition.from_owner(owner, size)
        with gp.use_groups(gp.graph_groups(size, comm=world().sub(range(size)))):
            split = gp.split_potential(model, part, skin=0.3, adapter=adapter)
            split.zero_grad()
            out = split(pos, numbers, cell=cell, stress=cell is not None)
            loss_of(out.energy, out.forces, out.stress).backward()
            gp.sync_gradients(split)
        assert_equal(out.energy, energy)
        assert_equal(out.forces, -forces)
        if stress is not None:
            assert_equal(out.stress, stress)
        scale = max(float(g.abs().max()) for g in gradients if g is not None)
        for weight, gradient in zip(weights, gradients, strict=True):
            if gradient is not None:
                assert_equal(weight.grad, gradient, scale)


@pytest.fixture(scope="module")
def ranks_with_pyg(rank_pool):
    """Ranks forked from a process that has loaded PyG, which takes a while."""
    with RankPool(preload=["torch_geometric.nn"]) as pool:
        pool.by_value = rank_pool.by_value
        yield pool


@pytest.mark.skipif(find_spec("torch_geometric") is None, reason="no torch_geometric here")
@pytest.mark.parametrize("name", ["ViSNet", "SchNet", "DimeNetPlusPlus"])
@pytest.mark.timeout(300)
def test_a_model_of_pyg_is_split_unchanged(name, ranks_with_pyg):
    ranks_with_pyg.run(compare, of_pyg, name, world=4, timeout=240)


@pytest.mark.parametrize(
    ("package", "name"),
    [("matgl", "TensorNet"), ("matgl", "M3GNet"), ("matgl", "CHGNet"), ("sevenn", "SevenNet")],
)
@pytest.mark.timeout(600)
def test_a_model_with_requirements_of_its_own_is_split_unchanged(package, name):
    folder = os.environ.get("POTENTIALS")
    if not folder:
        pytest.skip(f"POTENTIALS=folder installs {package} there, and tests {name}")
    target = Path(folder, package).resolve()
    if not (target / package).is_dir():
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*install, "--target", target, *SEPARATE[package]], check=True)
    make = {"matgl": of_matgl, "sevenn": of_sevenn}[package]
    unisono.run(compare, make, name, str(target), ranks=4)


def test_a_model_that_searches_its_edges_by_other_means_is_refused():
    class Dense(torch.nn.Module):
        def forward(self, z, pos, batch):
            return torch.cdist(pos, pos).sum().reshape(1)

    part = GraphPartition.contiguous(3, 1)
    adapter = adapters.by_forward(lambda _: 1.0, lambda _: 1)
    split = gp.split_potential(Dense(), part, adapter=adapter)
    with pytest.raises(PartitionError, match="radius_graph"):
        split(torch.rand(3, 3), torch.ones(3, dtype=torch.int64))
