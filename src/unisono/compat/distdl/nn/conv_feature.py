"""DistDL's `nn.conv_feature`: convolutions split in space."""

from __future__ import annotations

import torch
from torch import Tensor

from unisono import nn as ours
from unisono.nn.conv_settings import Size
from unisono.nn.parameters import Weights
from unisono.topology import Partition

from ..backends.mpi.buffer import MPIBufferManager, manager_or_new
from ..backends.mpi.partition import MPIPartition, layout_of
from .module import Module
from .stored import LocalLayer, StoredParameters

__all__ = [
    "DistributedFeatureConv1d",
    "DistributedFeatureConv2d",
    "DistributedFeatureConv3d",
    "DistributedFeatureConvTranspose1d",
    "DistributedFeatureConvTranspose2d",
    "DistributedFeatureConvTranspose3d",
]


class _OnFirstRank(StoredParameters):
    """Weight and bias are stored on the first rank of `P_x`."""

    P_x: Partition
    weight: Tensor
    bias: Tensor | None
    use_bias: bool

    @property
    def stores_bias(self) -> bool:
        """Whether the bias is stored on this rank."""
        return self.use_bias and self.P_x.rank == 0

    @property
    def receives_bias(self) -> bool:
        """Whether this rank computes with the bias."""
        return self.use_bias and self.P_x.active

    @property
    def serial(self) -> bool:
        """Whether the layer is on one rank."""
        return self.P_x.size == 1

    @property
    def conv_layer(self) -> LocalLayer:
        """The parameters that this rank stores."""
        return LocalLayer(self.weight, self.bias)


class _FeatureConv(_OnFirstRank):
    def __init__(
        self,
        P_x: MPIPartition | Partition,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size | str = 0,
        padding_mode: str = "zeros",
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
        buffer_manager: MPIBufferManager | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        weights: Weights = "root",
    ) -> None:
        super().__init__(
            layout_of(P_x), in_channels, out_channels, kernel_size, stride, padding, padding_mode,
            dilation, groups, bias, device=device, dtype=dtype, weights=weights,
        )  # fmt: skip
        self.buffer_manager = manager_or_new(buffer_manager)


class _FeatureConvTranspose(_OnFirstRank):
    def __init__(
        self,
        P_x: MPIPartition | Partition,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size = 0,
        output_padding: Size = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Size = 1,
        buffer_manager: MPIBufferManager | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        weights: Weights = "root",
    ) -> None:
        super().__init__(
            layout_of(P_x), in_channels, out_channels, kernel_size, stride, padding,
            output_padding, groups, bias, dilation, device=device, dtype=dtype, weights=weights,
        )  # fmt: skip
        self.buffer_manager = manager_or_new(buffer_manager)


class DistributedFeatureConv1d(_FeatureConv, ours.DistributedFeatureConv1d, Module):
    """`torch.nn.Conv1d` of a tensor `(N, C, L)` split in N and L."""


class DistributedFeatureConv2d(_FeatureConv, ours.DistributedFeatureConv2d, Module):
    """`torch.nn.Conv2d` of a tensor `(N, C, H, W)` split in N, H and W."""


class DistributedFeatureConv3d(_FeatureConv, ours.DistributedFeatureConv3d, Module):
    """`torch.nn.Conv3d` of a tensor `(N, C, D, H, W)` split in N, D, H and W."""


class DistributedFeatureConvTranspose1d(
    _FeatureConvTranspose, ours.DistributedFeatureConvTranspose1d, Module
):
    """`torch.nn.ConvTranspose1d` of a split tensor; DistDL has none."""


class DistributedFeatureConvTranspose2d(
    _FeatureConvTranspose, ours.DistributedFeatureConvTranspose2d, Module
):
    """`torch.nn.ConvTranspose2d` of a split tensor; DistDL has none."""


class DistributedFeatureConvTranspose3d(
    _FeatureConvTranspose, ours.DistributedFeatureConvTranspose3d, Module
):
    """`torch.nn.ConvTranspose3d` of a split tensor; DistDL has none."""
