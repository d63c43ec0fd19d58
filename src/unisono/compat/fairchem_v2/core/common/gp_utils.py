"""fairchem 2.x's graph-parallel module: dim 0 everywhere, gathers told the number of atoms.

The second positional argument of a gather is `natoms`, so no size is exchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unisono import graph_parallel as gp
from unisono.graph_parallel import (
    CopyToModelParallelRegion,
    ReduceFromModelParallelRegion,
    ScaleBackwardGrad,
    ScatterToModelParallelRegion,
    cleanup_gp,
    copy_to_model_parallel_region,
    divide_and_check_no_remainder,
    ensure_div,
    get_dp_group,
    get_dp_rank,
    get_dp_world_size,
    get_gp_group,
    get_gp_rank,
    get_gp_world_size,
    initialized,
    live_view,
    pad_input,
    reduce_from_model_parallel_region,
    scale_backward_grad,
    setup_gp,
    setup_graph_parallel_groups,
    size_list_fn,
)

if TYPE_CHECKING:
    import torch.distributed as dist

    _GRAPH_PARALLEL_GROUP: dist.ProcessGroup | None
    _DATA_PARALLEL_GROUP: dist.ProcessGroup | None

__all__ = [
    "CopyToModelParallelRegion",
    "GPMode",
    "GPPartition",
    "GatherFromModelParallelRegionGradPadded",
    "GatherFromModelParallelRegionSumGradPadded",
    "GraphParallelConfig",
    "ReduceFromModelParallelRegion",
    "ScaleBackwardGrad",
    "ScatterToModelParallelRegion",
    "cleanup_gp",
    "copy_to_model_parallel_region",
    "divide_and_check_no_remainder",
    "ensure_div",
    "gather_from_model_parallel_region",
    "gather_from_model_parallel_region_sum_grad",
    "get_dp_group",
    "get_dp_rank",
    "get_dp_world_size",
    "get_gp_config",
    "get_gp_group",
    "get_gp_rank",
    "get_gp_world_size",
    "initialized",
    "pad_input",
    "reduce_from_model_parallel_region",
    "resolve_gp_config_for_workers",
    "scale_backward_grad",
    "scatter_to_model_parallel_region",
    "set_gp_config",
    "setup_gp",
    "setup_graph_parallel_groups",
    "size_list_fn",
]


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


def gather_from_model_parallel_region(input: Tensor, natoms: int) -> Tensor:
    """Return all rows; each rank takes its own rows of the gradient."""
    return gp.gather(input, 0, grad="slice", natoms=natoms)


def gather_from_model_parallel_region_sum_grad(input: Tensor, natoms: int) -> Tensor:
    """Return all rows; gradients are summed over the row."""
    return gp.gather(input, 0, grad="sum", natoms=natoms)


def scatter_to_model_parallel_region(input: Tensor) -> Tensor:
    """Return the own rows; their gradient is gathered."""
    return gp.scatter(input, 0)


class _Padded:
    """Blocks of one length, as a tuple of W: gather along dim 0, then cut."""

    grad: str

    @classmethod
    def apply(cls, padded: Tensor) -> tuple[Tensor, ...]:
        """Return the padded blocks of all ranks, in rank order."""
        sizes = [padded.shape[0]] * gp.get_gp_world_size()
        convention: Any = cls.grad
        return torch.split(gp.gather(padded, 0, grad=convention, sizes=sizes), sizes)


class GatherFromModelParallelRegionGradPadded(_Padded):
    """Each rank takes its own block of the gradient."""

    grad = "slice"


class GatherFromModelParallelRegionSumGradPadded(_Padded):
    """Gradients are summed over the row."""

    grad = "sum"


def __getattr__(name: str) -> object:
    """Show the present groups under their two attribute names."""
    return live_view(__name__, name)
