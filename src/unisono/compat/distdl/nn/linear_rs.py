"""The `nn.linear_rs` of DistDL's forks: row-parallel linear."""

from __future__ import annotations

from typing import Any

import torch

from unisono import nn as ours
from unisono.topology import Partition

from ..backends.mpi.partition import MPIPartition, layout_of
from .module import Module
from .stored import refuse_unknown

__all__ = ["DistributedLinearReduceScatter"]


class DistributedLinearReduceScatter(ours.DistributedLinearReduceScatter, Module):
    """Row-parallel linear: each rank multiplies its input features, sums are cut into blocks.

    `collect_state` has no effect: `state_dict()` always gives whole tensors.
    """

    def __init__(
        self,
        P_x: MPIPartition | Partition,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        P_y: MPIPartition | Partition | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        collect_state: bool = False,  # noqa: ARG002
        **unknown: Any,
    ) -> None:
        refuse_unknown(self, unknown)
        wanted = None if P_y is None else layout_of(P_y)
        super().__init__(
            layout_of(P_x), in_features, out_features, bias, P_y=wanted, device=device, dtype=dtype
        )
