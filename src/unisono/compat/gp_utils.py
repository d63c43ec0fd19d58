"""What the tables of ocpmodels and fairchem have beyond the names of `unisono.graph_parallel`.

The regions as the autograd Functions of gp_utils' page, for code that calls `Class.apply` itself;
the helpers with an underscore; and what fairchem 1.x and 2.x spell in their own ways.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from unisono import graph_parallel as gp
from unisono.graph_parallel.groups import current_gp
from unisono.graph_parallel.padding import split_tensor
from unisono.operators import all_gather_rows
from unisono.topology import RowPlan

GROUPS = {"_GRAPH_PARALLEL_GROUP": gp.get_gp_group, "_DATA_PARALLEL_GROUP": gp.get_dp_group}
"""Attributes of gp_utils that always show the present groups."""
SHARED = (
    "cleanup_gp copy_to_model_parallel_region divide_and_check_no_remainder ensure_div "
    "get_dp_group get_dp_rank get_dp_world_size get_gp_group get_gp_rank get_gp_world_size "
    "initialized reduce_from_model_parallel_region setup_gp"
)
"""Names of `unisono.graph_parallel` that every spelling has."""


class _Region(torch.autograd.Function):
    """A region as a Function. `apply` is the region's own function, so derivatives are as well.

    `forward` and `backward` serve code that calls them itself, with a context of its own.
    """

    region: ClassVar[Callable[..., Tensor]]

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        """Apply the region, recorded for autograd."""
        return cls.region(*args, **kwargs)

    @classmethod
    def forward(cls, ctx: Any, input: Tensor) -> Tensor:
        """Return what the region gives."""
        return cls._run(ctx, input)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:  # type: ignore[override]
        """Return the gradient of the input."""
        return torch.autograd.grad(ctx.output, ctx.input, grad_output)[0]

    @classmethod
    def _run(cls, ctx: Any, input: Tensor, *rest: int) -> Tensor:
        with torch.enable_grad():
            ctx.input = input.detach().requires_grad_()
            ctx.output = cls.region(ctx.input, *rest)
        return ctx.output.detach()


class _RegionAlong(_Region):
    """A region along one dim."""

    @classmethod
    def forward(cls, ctx: Any, input: Tensor, dim: int = -1) -> Tensor:
        """Return what the region gives."""
        return cls._run(ctx, input, dim)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        """Return the gradient of the input; a dim has none."""
        return _Region.backward(ctx, grad_output), None


_REGIONS: dict[str, tuple[type[_Region], Callable[..., Tensor]]] = {
    "CopyToModelParallelRegion": (_Region, gp.copy_to_model_parallel_region),
    "ReduceFromModelParallelRegion": (_Region, gp.reduce_from_model_parallel_region),
    "ScatterToModelParallelRegion": (_RegionAlong, gp.scatter_to_model_parallel_region),
    "GatherFromModelParallelRegion": (_RegionAlong, gp.gather_from_model_parallel_region),
    "GatherFromModelParallelRegionSumGrad": (
        _RegionAlong,
        gp.gather_from_model_parallel_region_sum_grad,
    ),
    "ScaleBackwardGrad": (_Region, gp.scale_backward_grad),
    "ReduceScatterToModelParallelRegion": (
        _RegionAlong,
        gp.reduce_scatter_to_model_parallel_region,
    ),
}
for _name, (_base, _region) in _REGIONS.items():
    _members = {"__doc__": _region.__doc__, "__module__": __name__, "region": staticmethod(_region)}
    globals()[_name] = type(_name, (_base,), _members)


def summed(ctx: Any, input: Tensor) -> Tensor:  # noqa: ARG001
    """Return the sum over the row, a new tensor without gradient; `ctx` is not looked at."""
    return current_gp().all_reduce(input)


def own_block(input: Tensor, dim: int = -1) -> Tensor:
    """Return a copy of the own balanced block along `dim`."""
    comm = current_gp()
    block = split_tensor(input, comm.size, dim)[comm.rank]
    return block.clone(memory_format=torch.contiguous_format)


def joined(input: Tensor, dim: int = -1) -> Tensor:
    """Return the blocks of all ranks joined along `dim`, without gradient; sizes may differ."""
    return current_gp().all_gather(input, dim)


# fairchem 1.x: the row says how many parts there are.


def block_lengths(tensor: Tensor, dim: int = -1) -> list[int]:
    """Return the lengths along `dim` of the row's blocks of `tensor`."""
    return gp.size_list_fn(tensor.size(dim), gp.get_gp_world_size())


def row_blocks(
    tensor: Tensor, dim: int = -1, contiguous_chunks: bool = False
) -> tuple[Tensor, ...]:
    """Return one balanced chunk for each rank of the row."""
    return split_tensor(tensor, gp.get_gp_world_size(), dim, contiguous_chunks)


# fairchem 2.x: dim 0 everywhere; gathers get the number of atoms, so no size is exchanged.


def gather_rows(input: Tensor, natoms: int) -> Tensor:
    """Return all rows; each rank takes its own rows of the gradient."""
    return gp.gather(input, 0, grad="slice", natoms=natoms)


def gather_rows_sum_grad(input: Tensor, natoms: int) -> Tensor:
    """Return all rows; gradients are summed over the row."""
    return gp.gather(input, 0, grad="sum", natoms=natoms)


def scatter_rows(input: Tensor) -> Tensor:
    """Return the own rows; their gradient is gathered."""
    return gp.scatter(input, 0)


class GatherFromModelParallelRegionGradPadded:
    """Blocks of one length, gathered; each rank takes its own block of the gradient."""

    grad: ClassVar[Literal["slice", "sum"]] = "slice"

    @classmethod
    def apply(cls, padded: Tensor) -> tuple[Tensor, ...]:
        """Return the padded blocks of all ranks, in rank order."""
        sizes = [padded.shape[0]] * gp.get_gp_world_size()
        return torch.split(gp.gather(padded, 0, grad=cls.grad, sizes=sizes), sizes)


class GatherFromModelParallelRegionSumGradPadded(GatherFromModelParallelRegionGradPadded):
    """Blocks of one length, gathered; gradients are summed over the row."""

    grad = "sum"


class GPMode(str, Enum):  # noqa: UP042 - fairchem's members are strings that print as members
    """How features reach the ranks that need them."""

    ALLGATHER = "allgather"
    ALL_TO_ALL = "all_to_all"


class GPPartition(str, Enum):  # noqa: UP042
    """How nodes are dealt out."""

    INDEX_SPLIT = "index_split"
    SPATIAL = "spatial"


@dataclass
class GraphParallelConfig:
    """What a model wants of graph parallelism."""

    group_size: int = 1
    """Ranks that share a graph."""
    mode: GPMode = GPMode.ALLGATHER
    """How features travel."""
    partition: GPPartition = GPPartition.INDEX_SPLIT
    """How nodes are dealt out."""


_config: GraphParallelConfig | None = None


def set_gp_config(config: GraphParallelConfig | None) -> None:
    """Remember the configuration for this process."""
    global _config
    _config = config


def get_gp_config() -> GraphParallelConfig | None:
    """Return what `set_gp_config` was given."""
    return _config


def resolve_gp_config_for_workers(
    gp_config: GraphParallelConfig | None, num_workers: int
) -> GraphParallelConfig | None:
    """Return the configuration for that many workers: they all share the graph.

    Raises:
        ValueError: the configuration says another number.
    """
    if num_workers <= 1:
        return gp_config
    if gp_config is None:
        return GraphParallelConfig(group_size=num_workers)
    if gp_config.group_size == 1:
        return replace(gp_config, group_size=num_workers)
    if gp_config.group_size != num_workers:
        raise ValueError(
            f"group_size={gp_config.group_size} with {num_workers} workers\n"
            f"  {gp_config.group_size} != {num_workers}\n"
            f"  HINT: GraphParallelConfig(group_size={num_workers}), or leave it out"
        )
    return gp_config


# fairchem 2.x, `parallelism`: only the rows that a rank's edges touch travel, by a `GraphPlan`.


class GPContext:
    """What a rank sends and receives in a layer: a `GraphPlan` under fairchem's names."""

    def __init__(self, plan: gp.GraphPlan) -> None:
        self.plan = plan
        self.rank, self.world_size = plan.comm.rank, plan.comm.size
        self.total_local_atoms = plan.num_local
        self.total_recv = self.total_needed_atoms = plan.num_halo
        self.send_indices, self.edge_index_local = plan.send_index, plan.edge_index
        self.send_splits, self.recv_splits = list(plan.send_sizes), list(plan.recv_sizes)
        self.local_edge_idx, self.remote_edge_idx = plan.inner_edges, plan.outer_edges
        device = plan.edge_index.device
        self.send_counts = torch.tensor(self.send_splits, device=device)
        self.recv_counts = torch.tensor(self.recv_splits, device=device)
        self.rank_assignments = plan.partition.owner.to(device)
        self.node_partition, self.needed_atoms = plan.local_nodes, plan.halo_nodes
        self.needed_from_ranks = self.rank_assignments[plan.halo_nodes]
        self.global_to_local = torch.full((plan.partition.num_nodes,), -1, device=device)
        shown = torch.cat([plan.local_nodes, plan.halo_nodes])
        self.global_to_local[shown] = torch.arange(len(shown), device=device)


def partition_atoms_spatial(pos: Tensor, num_ranks: int, num_iters: int = 10) -> Tensor:  # noqa: ARG001
    """Return the rank of each atom: equal cuts of a Morton curve. `num_iters` has no effect."""
    return gp.GraphPartition.morton(pos, num_ranks).owner.to(pos.device)


def partition_atoms_index_split(
    total_atoms: int, num_ranks: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Return the rank of each atom: balanced blocks in the given order."""
    return gp.GraphPartition.contiguous(total_atoms, num_ranks).owner.to(device)


def compute_a2a_partition(
    pos: Tensor,
    total_atoms: int,
    device: torch.device | str,
    world_size: int,
    rank: int,
    strategy: GPPartition,
) -> tuple[Tensor, Tensor]:
    """Return the rank of each atom, and the atoms of this rank."""
    if GPPartition(strategy) is GPPartition.SPATIAL:
        owner = partition_atoms_spatial(pos, world_size).to(device)
    else:
        owner = partition_atoms_index_split(total_atoms, world_size, device)
    return owner, (owner == rank).nonzero()[:, 0]


def build_gp_context(
    edge_index: Tensor,
    rank_assignments: Tensor,
    rank: int,
    world_size: int,
    node_partition: Tensor | None = None,  # noqa: ARG001 - the assignments tell it
) -> GPContext:
    """Return what this rank needs for all-to-all. Collective over the row.

    Args:
        edge_index: edges that end in this rank's atoms, numbers of the whole graph.
        rank_assignments: the rank of each atom.
        rank: own place in the row; `world_size` its ranks.
        world_size: as set up.
        node_partition: this rank's atoms; not needed.
    """
    comm = current_gp()
    if (rank, world_size) != (comm.rank, comm.size):
        raise ValueError(
            f"build_gp_context(rank={rank}, world_size={world_size})\n"
            f"  found: rank {comm.rank} of {comm.size} in the row\n"
            "  HINT: get_gp_rank(), get_gp_world_size()"
        )
    partition = gp.GraphPartition.from_owner(rank_assignments, world_size)
    return GPContext(gp.GraphPlan(partition, edge_index, edges="local", comm=comm))


def all_to_all_collect(
    x_local: Tensor,
    gp_ctx: GPContext,
    send_indices: Tensor | None = None,  # noqa: ARG001 - the context has them
) -> Tensor:
    """Return the rows of other ranks that own edges touch, to be joined behind the own ones."""
    return gp_ctx.plan.exchange(x_local)


class AllToAllCollect:
    """`all_to_all_collect` of explicit lists, as fairchem's autograd Function takes them."""

    @staticmethod
    def apply(
        x_local: Tensor,
        send_indices: Tensor,
        send_counts: Tensor,
        recv_counts: Tensor,
        *_: object,
    ) -> Tensor:
        """Return the received rows. The row of ranks is the one that was set up."""
        sizes = tuple(send_counts.tolist()), tuple(recv_counts.tolist())
        return all_gather_rows(
            x_local, RowPlan(len(x_local), send_indices, *sizes), comm=current_gp()
        )
