"""DistDL's `nn.pooling`: the stride is 1 unless it is given, unlike torch's."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from unisono import nn as ours
from unisono.errors import PartitionError
from unisono.nn.conv_settings import Size
from unisono.topology import Partition
from unisono.topology.window import per_dim

from ..backends.mpi.buffer import MPIBufferManager, manager_or_new
from ..backends.mpi.partition import MPIPartition, layout_of
from .module import Module

__all__ = [
    "DistributedAvgPool1d",
    "DistributedAvgPool2d",
    "DistributedAvgPool3d",
    "DistributedMaxPool1d",
    "DistributedMaxPool2d",
    "DistributedMaxPool3d",
]


class _Pool(nn.Module):
    """DistDL's arguments. Stands before a pooling of `unisono.nn`."""

    _dilates: ClassVar[bool] = True
    dims: ClassVar[int]

    def __init__(
        self,
        P_x: MPIPartition | Partition,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size = 0,
        dilation: Size = 1,
        buffer_manager: MPIBufferManager | None = None,
    ) -> None:
        if self._dilates:
            super().__init__(layout_of(P_x), kernel_size, stride, padding, dilation)
        else:
            if any(size != 1 for size in per_dim(dilation, self.dims, "dilation")):
                raise PartitionError.because(
                    f"{type(self).__name__}(dilation={dilation})",
                    "torch averages neighbouring points only",
                    None,
                    "dilation=1",
                )
            super().__init__(layout_of(P_x), kernel_size, stride, padding)
        self.buffer_manager = manager_or_new(buffer_manager)


class DistributedMaxPool1d(_Pool, ours.DistributedMaxPool1d, Module):
    """`torch.nn.MaxPool1d` of a split tensor `(N, C, L)`."""


class DistributedMaxPool2d(_Pool, ours.DistributedMaxPool2d, Module):
    """`torch.nn.MaxPool2d` of a split tensor `(N, C, H, W)`."""


class DistributedMaxPool3d(_Pool, ours.DistributedMaxPool3d, Module):
    """`torch.nn.MaxPool3d` of a split tensor `(N, C, D, H, W)`."""


class DistributedAvgPool1d(_Pool, ours.DistributedAvgPool1d, Module):
    """`torch.nn.AvgPool1d` of a split tensor `(N, C, L)`."""

    _dilates = False


class DistributedAvgPool2d(_Pool, ours.DistributedAvgPool2d, Module):
    """`torch.nn.AvgPool2d` of a split tensor `(N, C, H, W)`."""

    _dilates = False


class DistributedAvgPool3d(_Pool, ours.DistributedAvgPool3d, Module):
    """`torch.nn.AvgPool3d` of a split tensor `(N, C, D, H, W)`."""

    _dilates = False
