"""ocpmodels' graph-parallel module, name by name, on `unisono.graph_parallel`.

What differs: blocks are balanced instead of cut by the ceiling, padding is zeros, nothing changes
in place (`_reduce` returns a new tensor), `cleanup_gp` resets, and second derivatives are right.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional

import torch

from unisono import graph_parallel as gp
from unisono.graph_parallel import (
    CopyToModelParallelRegion,
    GatherFromModelParallelRegion,
    ReduceFromModelParallelRegion,
    ScatterToModelParallelRegion,
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
)

if TYPE_CHECKING:
    import torch.distributed as dist

    _GRAPH_PARALLEL_GROUP: dist.ProcessGroup | None
    _DATA_PARALLEL_GROUP: dist.ProcessGroup | None

__all__ = [
    "CopyToModelParallelRegion",
    "GatherFromModelParallelRegion",
    "ReduceFromModelParallelRegion",
    "ScatterToModelParallelRegion",
    "cleanup_gp",
    "copy_to_model_parallel_region",
    "divide_and_check_no_remainder",
    "ensure_div",
    "gather_from_model_parallel_region",
    "get_dp_group",
    "get_dp_rank",
    "get_dp_world_size",
    "get_gp_group",
    "get_gp_rank",
    "get_gp_world_size",
    "initialized",
    "pad_tensor",
    "reduce_from_model_parallel_region",
    "scatter_to_model_parallel_region",
    "setup_gp",
    "trim_tensor",
]


def setup_gp(config) -> None:  # noqa: ANN001
    """Set up groups of `config["gp_gpus"]` ranks. Collective over the world."""
    gp.setup_gp(config)


def pad_tensor(
    tensor: torch.Tensor,
    dim: int = -1,
    target_size: Optional[int] = None,  # noqa: UP045
) -> torch.Tensor:
    """Return `tensor` with zeros appended along `dim`."""
    return gp.pad_tensor(tensor, dim, target_size)


def trim_tensor(  # noqa: ANN201
    tensor: torch.Tensor,
    sizes: Optional[torch.Tensor] = None,  # noqa: UP045
    dim: int = 0,
):
    """Return `tensor` and `sizes` cut to a multiple of the row's ranks."""
    return gp.trim_tensor(tensor, sizes, dim)


def _split_tensor(  # noqa: ANN202
    tensor: torch.Tensor, num_parts: int, dim: int = -1, contiguous_chunks: bool = False
):
    """Return exactly `num_parts` balanced chunks."""
    return gp._split_tensor(tensor, num_parts, dim, contiguous_chunks)


def _reduce(ctx: Any, input: torch.Tensor) -> torch.Tensor:
    """Return the sum over the row, a new tensor."""
    return gp._reduce(ctx, input)


def _split(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Return a copy of the own block."""
    return gp._split(input, dim)


def _gather(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Return the joined blocks; sizes may differ."""
    return gp._gather(input, dim)


def _gather_with_padding(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Return the joined blocks; sizes may differ."""
    return gp._gather_with_padding(input, dim)


def copy_to_model_parallel_region(input: torch.Tensor) -> torch.Tensor:
    """Return `input`; its gradient is summed over the row."""
    return gp.copy_to_model_parallel_region(input)


def reduce_from_model_parallel_region(input: torch.Tensor) -> torch.Tensor:
    """Return the sum over the row; its gradient passes unchanged."""
    return gp.reduce_from_model_parallel_region(input)


def scatter_to_model_parallel_region(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Return the own block along `dim`; its gradient is gathered."""
    return gp.scatter_to_model_parallel_region(input, dim)


def gather_from_model_parallel_region(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Return the joined blocks; each rank takes its own block of the gradient."""
    return gp.gather_from_model_parallel_region(input, dim)


def __getattr__(name: str) -> object:
    """Show the present groups under their two attribute names."""
    return live_view(__name__, name)
