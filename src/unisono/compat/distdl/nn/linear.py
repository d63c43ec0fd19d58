"""DistDL's `nn.linear`."""

from __future__ import annotations

import torch

from unisono import nn as ours
from unisono.nn.parameters import Weights
from unisono.topology import Partition

from ..backends.mpi.partition import MPIPartition, layout_of
from .module import Module
from .stored import StoredParameters

__all__ = ["DistributedLinear"]


class DistributedLinear(StoredParameters, ours.DistributedLinear, Module):
    """`torch.nn.Linear` with input, weight and output split over three partitions.

    The local layer is `.sublinear`; the bias is in the first column of `P_w`.
    """

    def __init__(
        self,
        P_x: MPIPartition | Partition,
        P_y: MPIPartition | Partition,
        P_w: MPIPartition | Partition,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        weights: Weights = "root",
    ) -> None:
        super().__init__(
            layout_of(P_x), layout_of(P_y), layout_of(P_w), in_features, out_features, bias,
            device=device, dtype=dtype, weights=weights,
        )  # fmt: skip

    @property
    def serial(self) -> bool:
        """Whether the weight is on one rank."""
        return self.P_w.size == 1

    @property
    def receives_bias(self) -> bool:
        """Whether this rank computes with the bias."""
        index = self.P_w.index
        return self.use_bias and index is not None and index[-1] == 0

    @property
    def stores_bias(self) -> bool:
        """Whether the bias is stored on this rank."""
        return self.bias is not None and self.bias.numel() > 0
