"""fairchem 2.x's graph-parallel module: `unisono.compat.fairchem_v2.core.common.gp_utils`.

Dim 0 everywhere; the second positional argument of a gather is `natoms`, so no size is exchanged.
"""

from __future__ import annotations

from unisono import graph_parallel
from unisono.compat import gp_utils
from unisono.compat.modules import Module, build

_ALL_TO_ALL = (
    (
        gp_utils,
        "AllToAllCollect GPContext all_to_all_collect build_gp_context compute_a2a_partition",
    ),
    (
        gp_utils,
        "PartitionStrategy=GPPartition partition_atoms_index_split partition_atoms_spatial",
    ),
)

MODULES = {
    "": Module(""),
    "core": Module("The package that holds `common`."),
    "core.common": Module("The package that holds `gp_utils`."),
    "core.common.gp_utils": Module(
        "fairchem 2.x's graph-parallel module on `unisono.graph_parallel`.",
        (graph_parallel, gp_utils.SHARED),
        (graph_parallel, "pad_input scale_backward_grad setup_graph_parallel_groups size_list_fn"),
        (gp_utils, "gather_from_model_parallel_region=gather_rows"),
        (gp_utils, "gather_from_model_parallel_region_sum_grad=gather_rows_sum_grad"),
        (gp_utils, "scatter_to_model_parallel_region=scatter_rows"),
        (gp_utils, "CopyToModelParallelRegion ReduceFromModelParallelRegion"),
        (gp_utils, "GatherFromModelParallelRegionGradPadded ScaleBackwardGrad"),
        (gp_utils, "GatherFromModelParallelRegionSumGradPadded ScatterToModelParallelRegion"),
        (gp_utils, "GPMode GPPartition GraphParallelConfig"),
        (gp_utils, "get_gp_config resolve_gp_config_for_workers set_gp_config"),
        computed=gp_utils.GROUPS,
    ),
    "core.common.parallelism": Module("fairchem's all-to-all graph parallelism.", *_ALL_TO_ALL),
    "core.common.parallelism.graph_parallel_a2a": Module("Its messages.", _ALL_TO_ALL[0]),
    "core.common.parallelism.graph_partition": Module(
        "Its ways to deal atoms out.", _ALL_TO_ALL[1]
    ),
}

build(__name__, MODULES)
