"""One graph on many ranks: regions with their gradients right, partitions, and halo-only plans.

`GraphPartition` and `GraphPlan` are for new code; the regions and groups in gp_utils' spelling let
code written for it run unchanged. Everything works in a plain process, as a row of one rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unisono.errors import LayoutError
from unisono.graph_parallel.gradients import GraphParallel, sync_gradients
from unisono.graph_parallel.groups import (
    cleanup_gp,
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
    setup_gp,
    setup_graph_parallel_groups,
    use_groups,
)
from unisono.graph_parallel.layout import layout_check, layout_of, mark
from unisono.graph_parallel.matrix import GraphGroups, graph_groups
from unisono.graph_parallel.model_parallel import (
    CopyToModelParallelRegion,
    GatherFromModelParallelRegion,
    GatherFromModelParallelRegionSumGrad,
    ReduceFromModelParallelRegion,
    ReduceScatterToModelParallelRegion,
    ScaleBackwardGrad,
    ScatterToModelParallelRegion,
    copy_to_model_parallel_region,
    gather_from_model_parallel_region,
    gather_from_model_parallel_region_sum_grad,
    reduce_from_model_parallel_region,
    reduce_scatter_to_model_parallel_region,
    scale_backward_grad,
    scatter_to_model_parallel_region,
)
from unisono.graph_parallel.model_parallel import joined as _gather
from unisono.graph_parallel.model_parallel import joined as _gather_with_padding
from unisono.graph_parallel.model_parallel import own_block as _split
from unisono.graph_parallel.model_parallel import summed as _reduce
from unisono.graph_parallel.neighbours import Neighbours, radius_graph
from unisono.graph_parallel.padding import pad_input, pad_tensor, size_list_fn, trim_tensor
from unisono.graph_parallel.padding import split_tensor as _split_tensor
from unisono.graph_parallel.partition import GraphPartition
from unisono.graph_parallel.plan import GraphPlan
from unisono.graph_parallel.predict import parallel_predict
from unisono.graph_parallel.regions import (
    all_to_all,
    copy,
    gather,
    reduce,
    reduce_scatter,
    scatter,
)
from unisono.graph_parallel.sampler import GraphBatchSampler
from unisono.graph_parallel.stats import GraphStats

if TYPE_CHECKING:
    import torch.distributed as dist

    _GRAPH_PARALLEL_GROUP: dist.ProcessGroup | None
    _DATA_PARALLEL_GROUP: dist.ProcessGroup | None

__all__ = [
    # groups
    "GraphGroups",
    "cleanup_gp",
    "divide_and_check_no_remainder",
    "ensure_div",
    "get_dp_group",
    "get_dp_rank",
    "get_dp_world_size",
    "get_gp_group",
    "get_gp_rank",
    "get_gp_world_size",
    "graph_groups",
    "initialized",
    "setup_gp",
    "setup_graph_parallel_groups",
    "use_groups",
    # regions
    "all_to_all",
    "copy",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
    # regions in gp_utils' spelling
    "CopyToModelParallelRegion",
    "GatherFromModelParallelRegion",
    "GatherFromModelParallelRegionSumGrad",
    "ReduceFromModelParallelRegion",
    "ReduceScatterToModelParallelRegion",
    "ScaleBackwardGrad",
    "ScatterToModelParallelRegion",
    "copy_to_model_parallel_region",
    "gather_from_model_parallel_region",
    "gather_from_model_parallel_region_sum_grad",
    "reduce_from_model_parallel_region",
    "reduce_scatter_to_model_parallel_region",
    "scale_backward_grad",
    "scatter_to_model_parallel_region",
    # padding and splitting
    "_gather",
    "_gather_with_padding",
    "_reduce",
    "_split",
    "_split_tensor",
    "pad_input",
    "pad_tensor",
    "size_list_fn",
    "trim_tensor",
    # graphs
    "GraphBatchSampler",
    "GraphParallel",
    "GraphPartition",
    "GraphPlan",
    "GraphStats",
    "Neighbours",
    "parallel_predict",
    "radius_graph",
    # gradients and debugging
    "LayoutError",
    "layout_check",
    "layout_of",
    "mark",
    "sync_gradients",
]


def __getattr__(name: str) -> object:
    """Show the present groups under gp_utils' two attribute names."""
    return live_view(__name__, name)
