"""The `nn.layernorm` of DistDL's forks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from unisono import nn as ours
from unisono.nn.parameters import Weights
from unisono.topology import Partition

from ..backends.mpi.partition import MPIPartition, layout_of
from .module import Module
from .stored import StoredParameters, refuse_unknown

__all__ = ["DistributedLayerNorm"]


class DistributedLayerNorm(StoredParameters, ours.DistributedLayerNorm, Module):
    """`torch.nn.LayerNorm` of a tensor split in any dims.

    `collect_state` has no effect: `state_dict()` always gives whole tensors.
    """

    def __init__(
        self,
        P_x: MPIPartition | Partition,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        weights: Weights = "root",
        collect_state: bool = False,  # noqa: ARG002
        **unknown: Any,
    ) -> None:
        refuse_unknown(self, unknown)
        super().__init__(
            layout_of(P_x), normalized_shape, eps, elementwise_affine, bias,
            device=device, dtype=dtype, weights=weights,
        )  # fmt: skip
