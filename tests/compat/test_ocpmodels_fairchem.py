"""gp_utils' three spellings: signatures of the pages they follow, one shared state."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.distributed as dist

import unisono.compat
import unisono.graph_parallel
from unisono.comm import world
from unisono.compat.fairchem.core.common import gp_utils as v1
from unisono.compat.fairchem_v2.core.common import gp_utils as v2
from unisono.compat.fairchem_v2.core.common import parallelism
from unisono.compat.ocpmodels.common import gp_utils as ocp
from unisono.errors import MeshError

# Arguments that may be given without a name, of gp_utils' page.
ARGUMENTS = {
    "ensure_div": "a b",
    "divide_and_check_no_remainder": "a b",
    "setup_gp": "config",
    "cleanup_gp": "",
    "initialized": "",
    "get_dp_group": "",
    "get_gp_group": "",
    "get_dp_rank": "",
    "get_gp_rank": "",
    "get_dp_world_size": "",
    "get_gp_world_size": "",
    "pad_tensor": "tensor dim=-1 target_size=None",
    "trim_tensor": "tensor sizes=None dim=0",
    "_split_tensor": "tensor num_parts dim=-1 contiguous_chunks=False",
    "_reduce": "ctx input",
    "_split": "input dim=-1",
    "_gather": "input dim=-1",
    "_gather_with_padding": "input dim=-1",
    "copy_to_model_parallel_region": "input",
    "reduce_from_model_parallel_region": "input",
    "scatter_to_model_parallel_region": "input dim=-1",
    "gather_from_model_parallel_region": "input dim=-1",
}
CLASSES = {
    "CopyToModelParallelRegion": ["ctx", "input"],
    "ReduceFromModelParallelRegion": ["ctx", "input"],
    "ScatterToModelParallelRegion": ["ctx", "input", "dim"],
    "GatherFromModelParallelRegion": ["ctx", "input", "dim"],
}


def arguments_of(function):
    """Return the arguments that need no name, with their defaults."""
    return [
        p.name if p.default is p.empty else f"{p.name}={p.default}"
        for p in inspect.signature(function).parameters.values()
        if p.kind is not p.KEYWORD_ONLY
    ]


def test_signatures_of_ocpmodels():
    for name, wanted in ARGUMENTS.items():
        assert arguments_of(getattr(ocp, name)) == wanted.split(), name
    for name, arguments in CLASSES.items():
        region = getattr(ocp, name)
        assert issubclass(region, torch.autograd.Function)
        assert list(inspect.signature(region.forward).parameters) == arguments
        assert list(inspect.signature(region.backward).parameters) == ["ctx", "grad_output"]
        if "dim" in arguments:
            assert inspect.signature(region.forward).parameters["dim"].default == -1


@pytest.mark.ranks([1, 2])
def test_the_three_trees_share_one_state():
    ocp.setup_gp({"gp_gpus": world().size, "distributed_backend": None})
    for module in (ocp, v1, v2):
        assert module.initialized()
        assert module.get_gp_world_size() == world().size
        assert module._GRAPH_PARALLEL_GROUP is module.get_gp_group() is not None
        total = torch.ones(1)
        dist.all_reduce(total, group=module.get_gp_group())
        assert total.item() == world().size
        assert module._DATA_PARALLEL_GROUP is module.get_dp_group()
    v2.cleanup_gp()
    assert not ocp.initialized()
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = ocp.no_such_name


@pytest.mark.ranks([1, 2, 3])
def test_regions_of_every_tree_move_the_same_rows():
    size, rank = world().size, world().rank
    v1.setup_graph_parallel_groups(size)
    x = torch.arange(14.0, dtype=torch.float64).view(7, 2)
    mine = ocp.scatter_to_model_parallel_region(x, 0)
    assert torch.equal(mine, v1.scatter_to_model_parallel_region(x, 0))
    assert torch.equal(mine, v2.scatter_to_model_parallel_region(x))
    assert torch.equal(ocp.gather_from_model_parallel_region(mine, 0), x)
    assert torch.equal(v1.gather_from_model_parallel_region(mine, 0, natoms=7), x)
    assert torch.equal(v1.gather_from_model_parallel_region_sum_grad(mine, 0), x)
    assert torch.equal(v2.gather_from_model_parallel_region(mine, 7), x)
    assert torch.equal(v2.gather_from_model_parallel_region_sum_grad(mine, 7), x)
    assert v1._tensor_to_split_partitions(x, 0) == v2.size_list_fn(7, size)
    assert torch.equal(v1._split_tensor(x, 0)[rank], mine)
    assert torch.equal(ocp._split_tensor(x, size, 0)[rank], mine)
    assert torch.equal(ocp.reduce_from_model_parallel_region(x), size * x)
    for tree, factor in (
        (v2.GatherFromModelParallelRegionGradPadded, 1),
        (v2.GatherFromModelParallelRegionSumGradPadded, size),
    ):
        padded = v2.pad_input(mine, max(v2.size_list_fn(7, size))).clone().requires_grad_()
        blocks = tree.apply(padded)
        assert len(blocks) == size
        assert torch.equal(blocks[rank].detach(), padded.detach())
        torch.cat(blocks).sum().backward()
        assert torch.equal(padded.grad, torch.full_like(padded, factor))
    v1.cleanup_gp()


@pytest.mark.ranks(2)
def test_regions_before_set_up_are_refused_in_all_trees():
    calls = (
        lambda: ocp.copy_to_model_parallel_region(torch.ones(1)),
        lambda: v1.gather_from_model_parallel_region(torch.ones(1)),
        lambda: v2.scatter_to_model_parallel_region(torch.ones(1)),
    )
    for call in calls:
        with pytest.raises(MeshError, match="setup_gp"):
            call()


def test_configurations_for_workers():
    config = v2.GraphParallelConfig()
    assert (config.group_size, config.mode, config.partition) == (1, "allgather", "index_split")
    assert v2.GPMode("all_to_all") is v2.GPMode.ALL_TO_ALL
    assert v2.GPPartition("spatial") is v2.GPPartition.SPATIAL
    resolve = v2.resolve_gp_config_for_workers
    assert resolve(None, 1) is None
    assert resolve(config, 1) is config
    assert resolve(None, 4).group_size == 4
    spatial = v2.GraphParallelConfig(partition=v2.GPPartition.SPATIAL)
    assert resolve(spatial, 4) == v2.GraphParallelConfig(4, partition=v2.GPPartition.SPATIAL)
    assert spatial.group_size == 1
    with pytest.raises(ValueError, match="2 != 4"):
        resolve(v2.GraphParallelConfig(group_size=2), 4)
    v2.set_gp_config(config)
    assert v2.get_gp_config() is config
    v2.set_gp_config(None)


def message_passing(pos, weights, edges, rows, fetch, ends):
    """Return the energy of own rows: two layers, each sums messages at the ends of own edges."""
    h = torch.tanh(pos[rows] @ weights[0])
    reach = torch.exp(-(pos[edges[0]] - pos[edges[1]]).square().sum(1, keepdim=True))
    for weight in weights[1:]:
        messages = torch.tanh(fetch(h)[ends[0]] @ weight) * reach
        h = h + torch.zeros_like(h).index_add(0, ends[1], messages)
    return h.square().sum()


def learnt(energy, leaves, summed):
    """Return energy, forces, and the gradients of a loss of both: derivatives of second order."""
    (slope,) = torch.autograd.grad(energy, leaves[:1], create_graph=True)
    forces = -summed(slope)
    loss = energy**2 + (forces**2).sum()
    return [energy.detach(), forces.detach()], torch.autograd.grad(loss, leaves)


@pytest.mark.ranks([1, 2, 4])
@pytest.mark.parametrize("strategy", list(parallelism.PartitionStrategy))
def test_a_network_by_all_gather_or_all_to_all_is_that_of_one_process(strategy):
    """Energies, forces and gradients of a loss of both, as fairchem's backbones compute them."""
    size, rank, atoms = world().size, world().rank, 11
    v2.setup_graph_parallel_groups(size, None)
    made = torch.Generator().manual_seed(1)
    pos, *weights = (
        torch.randn(shape, dtype=torch.float64, generator=made)
        for shape in ((atoms, 3), (3, 5), (5, 5), (5, 5))
    )
    edges = torch.combinations(torch.arange(atoms)).t()
    edges = torch.cat([edges, edges.flip(0)], 1)
    edges = edges[:, (pos[edges[0]] - pos[edges[1]]).norm(dim=1) < 2.5]
    leaves = [t.clone().requires_grad_() for t in (pos, *weights)]
    everything = torch.arange(atoms)
    energy = message_passing(leaves[0], leaves[1:], edges, everything, lambda h: h, edges)
    alone, grads = learnt(energy, leaves, lambda t: t)
    expected = [*alone, *grads]

    owner, own = parallelism.compute_a2a_partition(pos, atoms, "cpu", size, rank, strategy)
    mine = edges[:, owner[edges[1]] == rank]
    context = parallelism.build_gp_context(mine, owner, rank, size, own)
    assert context.total_local_atoms == len(own)
    assert context.total_recv == sum(context.recv_splits) == int(context.recv_counts.sum())
    assert len(context.local_edge_idx) + len(context.remote_edge_idx) == mine.shape[1]
    assert torch.equal(context.global_to_local[mine], context.edge_index_local)
    assert torch.equal(owner[context.needed_atoms], context.needed_from_ranks)
    lists = (context.send_indices, context.send_counts, context.recv_counts, v2.get_gp_group(),
             rank, size, context.send_splits, context.recv_splits, context.total_recv)  # fmt: skip
    ways = {
        "a2a": lambda h: parallelism.all_to_all_collect(h, context),
        "Function": lambda h: parallelism.AllToAllCollect.apply(h, *lists),
    }
    ways = {
        name: (lambda h, fetch=fetch: torch.cat([h, fetch(h)]), context.edge_index_local)
        for name, fetch in ways.items()
    }
    if strategy is parallelism.PartitionStrategy.INDEX_SPLIT:
        ends = torch.stack([mine[0], mine[1] - int(own[0])])
        gather = v2.gather_from_model_parallel_region_sum_grad
        ways["allgather"] = (lambda h: gather(h, atoms), ends)
    for fetch, ends in ways.values():
        leaves = [t.clone().requires_grad_() for t in (pos, *weights)]
        part = message_passing(leaves[0], leaves[1:], mine, own, fetch, ends)
        total = v2.reduce_from_model_parallel_region(part)
        together, grads = learnt(total, leaves, v2.reduce_from_model_parallel_region)
        found = [*together, *(world().all_reduce(g) for g in grads)]
        torch.testing.assert_close(found, expected)
        for tensor in found:
            assert world().all_equal(tensor.tolist()), "the same bits on all ranks"
    with pytest.raises(ValueError, match="in the row"):
        parallelism.build_gp_context(mine, owner, rank, size + 1)
    v2.cleanup_gp()


@pytest.mark.ranks(2)
def test_the_second_derivative_of_a_gather_used_alike_by_all_ranks_is_that_of_one_process():
    v2.setup_graph_parallel_groups(2, None)
    x = torch.full((1,), 1.5, requires_grad=True)
    square = v2.gather_from_model_parallel_region(x, 2).sum() ** 2
    (first,) = torch.autograd.grad(square, x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert (first.item(), second.item()) == (6.0, 4.0)
    v2.cleanup_gp()


def test_the_gather_for_layers_is_where_the_page_says():
    name = "gather_from_model_parallel_region_sum_grad"
    assert [hasattr(module, name) for module in (ocp, v1, v2, unisono.graph_parallel)] == [
        False,
        True,
        True,
        True,
    ]
