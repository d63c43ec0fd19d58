"""DistDL's `nn.conv_general`: convolutions split in channels and space."""

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

__all__ = ["DistributedGeneralConv1d", "DistributedGeneralConv2d", "DistributedGeneralConv3d"]


class GeneralConv(StoredParameters):
    """Blocks of the weight are stored where their place in space is 0.

    Stands before a convolution of `unisono.nn` that takes three partitions.
    """

    P_w: Partition
    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        P_x: MPIPartition | Partition,
        P_y: MPIPartition | Partition,
        P_w: MPIPartition | Partition,
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
            layout_of(P_x), layout_of(P_y), layout_of(P_w), in_channels, out_channels, kernel_size,
            stride, padding, padding_mode, dilation, groups, bias, device=device, dtype=dtype,
            weights=weights,
        )  # fmt: skip
        self.buffer_manager = manager_or_new(buffer_manager)

    @property
    def serial(self) -> bool:
        """Whether the weight is on one rank."""
        return self.P_w.size == 1

    @property
    def conv_layer(self) -> LocalLayer:
        """The parameters that this rank stores."""
        return LocalLayer(self.weight, self.bias)


class DistributedGeneralConv1d(GeneralConv, ours.DistributedGeneralConv1d, Module):
    """`torch.nn.Conv1d` of a tensor split in batch, channels and length."""


class DistributedGeneralConv2d(GeneralConv, ours.DistributedGeneralConv2d, Module):
    """`torch.nn.Conv2d` of a tensor split in batch, channels and space."""


class DistributedGeneralConv3d(GeneralConv, ours.DistributedGeneralConv3d, Module):
    """`torch.nn.Conv3d` of a tensor split in batch, channels and space."""
