"""fairchem 1.x's graph-parallel module: the names of ocpmodels' one, and the newer ones.

The second positional argument of a gather is `dim`; `natoms=` and `sizes=` are accepted too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from unisono import graph_parallel as gp
from unisono.compat.ocpmodels.common.gp_utils import (
    _gather,
    _gather_with_padding,
    _reduce,
    _split,
    copy_to_model_parallel_region,
    pad_tensor,
    reduce_from_model_parallel_region,
    setup_gp,
    trim_tensor,
)
from unisono.graph_parallel import (
    CopyToModelParallelRegion,
    GatherFromModelParallelRegion,
    GatherFromModelParallelRegionSumGrad,
    ReduceFromModelParallelRegion,
    ScaleBackwardGrad,
    ScatterToModelParallelRegion,
    cleanup_gp,
    divide_and_check_no_remainder,
    ensure_div,
    gather_from_model_parallel_region,
    gather_from_model_parallel_region_sum_grad,
    get_dp_group,
    get_dp_rank,
    get_dp_world_size,
    get_gp_group,
    get_gp_rank,
    get_gp_world_size,
    initialized,
    live_view,
    scale_backward_grad,
    scatter_to_model_parallel_region,
    setup_graph_parallel_groups,
)

if TYPE_CHECKING:
    import torch.distributed as dist

    _GRAPH_PARALLEL_GROUP: dist.ProcessGroup | None
    _DATA_PARALLEL_GROUP: dist.ProcessGroup | None

__all__ = [
    "CopyToModelParallelRegion",
    "GatherFromModelParallelRegion",
    "GatherFromModelParallelRegionSumGrad",
    "ReduceFromModelParallelRegion",
    "ScaleBackwardGrad",
    "ScatterToModelParallelRegion",
    "_gather",
    "_gather_with_padding",
    "_reduce",
    "_split",
    "cleanup_gp",
    "copy_to_model_parallel_region",
    "divide_and_check_no_remainder",
    "ensure_div",
    "gather_from_model_parallel_region",
    "gather_from_model_parallel_region_sum_grad",
    "get_dp_group",
    "get_dp_rank",
    "get_dp_world_size",
    "get_gp_group",
    "get_gp_rank",
    "get_gp_world_size",
    "initialized",
    "pad_tensor",
    "reduce_from_model_parallel_region",
    "scale_backward_grad",
    "scatter_to_model_parallel_region",
    "setup_gp",
    "setup_graph_parallel_groups",
    "trim_tensor",
]


def _tensor_to_split_partitions(tensor: Tensor, dim: int = -1) -> list[int]:
    """Return the lengths along `dim` of the row's blocks of `tensor`."""
    return gp.size_list_fn(tensor.size(dim), gp.get_gp_world_size())


def _split_tensor(
    tensor: Tensor, dim: int = -1, contiguous_chunks: bool = False
) -> tuple[Tensor, ...]:
    """Return one balanced chunk for each rank of the row."""
    return gp._split_tensor(tensor, gp.get_gp_world_size(), dim, contiguous_chunks)


def __getattr__(name: str) -> object:
    """Show the present groups under their two attribute names."""
    return live_view(__name__, name)
