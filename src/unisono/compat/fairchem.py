"""fairchem 1.x's graph-parallel module: `from unisono.compat.fairchem.core.common import gp_utils`.

The names of ocpmodels' one, and newer ones. The second positional argument of a gather is `dim`;
`natoms=` and `sizes=` are accepted too. `_split_tensor` does not take the number of parts.
"""

from __future__ import annotations

from unisono import graph_parallel
from unisono.compat import gp_utils
from unisono.compat.modules import Module, build

MODULES = {
    "": Module(""),
    "core": Module("The package that holds `common`."),
    "core.common": Module("The package that holds `gp_utils`."),
    "core.common.gp_utils": Module(
        "fairchem 1.x's graph-parallel module on `unisono.graph_parallel`.",
        (graph_parallel, gp_utils.SHARED),
        (graph_parallel, "gather_from_model_parallel_region scatter_to_model_parallel_region"),
        (graph_parallel, "gather_from_model_parallel_region_sum_grad scale_backward_grad"),
        (graph_parallel, "pad_tensor setup_graph_parallel_groups trim_tensor"),
        (gp_utils, "CopyToModelParallelRegion GatherFromModelParallelRegion"),
        (gp_utils, "GatherFromModelParallelRegionSumGrad ReduceFromModelParallelRegion"),
        (gp_utils, "ScaleBackwardGrad ScatterToModelParallelRegion"),
        (gp_utils, "_gather=joined _gather_with_padding=joined _reduce=summed _split=own_block"),
        (gp_utils, "_split_tensor=row_blocks _tensor_to_split_partitions=block_lengths"),
        computed=gp_utils.GROUPS,
    ),
}

build(__name__, MODULES)
