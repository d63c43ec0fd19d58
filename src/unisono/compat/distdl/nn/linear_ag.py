"""The `nn.linear_ag` of DistDL's forks: column-parallel linear."""

from __future__ import annotations

from typing import Any

import torch

from unisono import nn as ours
from unisono.topology import Partition

from ..backends.mpi.partition import MPIPartition, layout_of
from .module import Module
from .stored import refuse_unknown

__all__ = ["DistributedLinearAllGather"]


class DistributedLinearAllGather(ours.DistributedLinearAllGather, Module):
    """Column-parallel linear: the input is gathered, each rank computes its output features.

    `collect_state` has no effect: `state_dict()` always gives whole tensors.
    """

    def __init__(
        self,
        P_y: MPIPartition | Partition,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        P_x: MPIPartition | Partition | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        collect_state: bool = False,  # noqa: ARG002
        **unknown: Any,
    ) -> None:
        refuse_unknown(self, unknown)
        given = None if P_x is None else layout_of(P_x)
        super().__init__(
            layout_of(P_y), in_features, out_features, bias, P_x=given, device=device, dtype=dtype
        )
