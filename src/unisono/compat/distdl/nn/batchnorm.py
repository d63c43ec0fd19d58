"""DistDL's `nn.batchnorm`."""

from __future__ import annotations

import torch
from torch import Tensor

from unisono import nn as ours
from unisono.nn.parameters import Weights
from unisono.topology import Partition

from ..backends.mpi.partition import MPIPartition, layout_of
from .module import Module
from .stored import StoredParameters

__all__ = ["DistributedBatchNorm"]


class DistributedBatchNorm(StoredParameters, ours.DistributedBatchNorm, Module):
    """`torch.nn.BatchNorm1d/2d/3d` of a tensor split in any dims.

    `gamma` and `beta` are the parameters `weight` and `bias`, seen in shape `[1, C, 1, ...]`.
    """

    def __init__(
        self,
        P_x: MPIPartition | Partition,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        weights: Weights = "root",
    ) -> None:
        super().__init__(
            layout_of(P_x), num_features, eps, momentum, affine, track_running_stats,
            device=device, dtype=dtype, weights=weights,
        )  # fmt: skip

    @property
    def gamma(self) -> Tensor | None:
        """The scale; what is written into it, or its gradient, is the parameter's."""
        return self._over_channels(self.weight)

    @property
    def beta(self) -> Tensor | None:
        """The shift; likewise."""
        return self._over_channels(self.bias)

    def _over_channels(self, parameter: Tensor | None) -> Tensor | None:
        if parameter is None:
            return None
        shape = (1, parameter.numel(), *(1,) * (self.P_x.dim - 2))
        seen = parameter.view(shape)
        if parameter.grad is not None:
            seen.grad = parameter.grad.view(shape)
        return seen
