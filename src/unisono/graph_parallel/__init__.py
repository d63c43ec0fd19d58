"""One graph on many ranks: regions with their gradients right, partitions, and halo-only plans.

`GraphPartition` and `GraphPlan` are for new code; the regions and groups in gp_utils' spelling let
code written for it run unchanged. Everything works in a plain process, as a row of one rank.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from unisono.errors import LayoutError
from unisono.graph_parallel.adapters import Adapter, Piece
from unisono.graph_parallel.gradients import GraphParallel, sync_gradients
from unisono.graph_parallel.groups import (
    GraphGroups,
    cleanup_gp,
    divide_and_check_no_remainder,
    ensure_div,
    get_dp_group,
    get_dp_rank,
    get_dp_world_size,
    get_gp_group,
    get_gp_rank,
    get_gp_world_size,
    graph_groups,
    initialized,
    parallel_predict,
    setup_gp,
    setup_graph_parallel_groups,
    use_groups,
)
from unisono.graph_parallel.neighbours import Neighbours, radius_graph
from unisono.graph_parallel.padding import pad_input, pad_tensor, size_list_fn, trim_tensor
from unisono.graph_parallel.partition import GraphPartition
from unisono.graph_parallel.plan import GraphPlan
from unisono.graph_parallel.potential import Prediction, SplitPotential, split_potential
from unisono.graph_parallel.regions import (
    all_to_all,
    copy,
    copy_to_model_parallel_region,
    gather,
    gather_from_model_parallel_region,
    gather_from_model_parallel_region_sum_grad,
    reduce,
    reduce_from_model_parallel_region,
    reduce_scatter,
    reduce_scatter_to_model_parallel_region,
    scale_backward_grad,
    scatter,
    scatter_to_model_parallel_region,
)
from unisono.graph_parallel.stats import GraphStats
from unisono.removed import removed_name

if TYPE_CHECKING:
    from unisono.graph_parallel.calculator import Calculator

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
    "copy_to_model_parallel_region",
    "gather_from_model_parallel_region",
    "gather_from_model_parallel_region_sum_grad",
    "reduce_from_model_parallel_region",
    "reduce_scatter_to_model_parallel_region",
    "scale_backward_grad",
    "scatter_to_model_parallel_region",
    # padding
    "pad_input",
    "pad_tensor",
    "size_list_fn",
    "trim_tensor",
    # graphs
    "GraphParallel",
    "GraphPartition",
    "GraphPlan",
    "GraphStats",
    "Neighbours",
    "parallel_predict",
    "radius_graph",
    # potentials
    "Adapter",
    "Piece",
    "Prediction",
    "SplitPotential",
    "split_potential",
    # gradients and debugging
    "LayoutError",
    "sync_gradients",
]
if find_spec("ase") is not None:  # `import *` asks for every name
    __all__ += ["Calculator"]


def __getattr__(name: str) -> Any:
    """Load `Calculator` on first use: it needs ASE."""
    if name == "Calculator":
        from unisono.graph_parallel.calculator import Calculator

        return Calculator
    raise removed_name(f"unisono.graph_parallel.{name}")
