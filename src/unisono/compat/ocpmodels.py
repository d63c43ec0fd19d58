"""ocpmodels' graph-parallel module: `from unisono.compat.ocpmodels.common import gp_utils`.

What differs: blocks are balanced instead of cut by the ceiling, padding is zeros, nothing changes
in place (`_reduce` returns a new tensor), `cleanup_gp` resets, and second derivatives are right.
"""

from __future__ import annotations

from unisono import graph_parallel
from unisono.compat import gp_utils
from unisono.compat.modules import Module, build
from unisono.graph_parallel import padding

MODULES = {
    "": Module(""),
    "common": Module("The package that holds `gp_utils`."),
    "common.gp_utils": Module(
        "ocpmodels' graph-parallel module on `unisono.graph_parallel`.",
        (graph_parallel, gp_utils.SHARED),
        (graph_parallel, "gather_from_model_parallel_region scatter_to_model_parallel_region"),
        (graph_parallel, "pad_tensor trim_tensor"),
        (gp_utils, "CopyToModelParallelRegion GatherFromModelParallelRegion"),
        (gp_utils, "ReduceFromModelParallelRegion ScatterToModelParallelRegion"),
        (gp_utils, "_gather=joined _gather_with_padding=joined _reduce=summed _split=own_block"),
        (padding, "_split_tensor=split_tensor"),
        computed=gp_utils.GROUPS,
    ),
}

build(__name__, MODULES)
