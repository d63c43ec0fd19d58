"""Transposed convolutions split in space and batch: inputs from neighbours, no sums to send."""

from __future__ import annotations

import torch

from unisono.nn.agreement import Cuts
from unisono.nn.layers.conv import FeatureConv, Size
from unisono.nn.parameters import Weights
from unisono.nn.planned import index_in
from unisono.nn.split_tensors.convolution import SpacePlan, transposed_plan
from unisono.topology import Partition
from unisono.topology.window import per_dim


class _FeatureConvTranspose(FeatureConv):
    def __init__(
        self,
        P_x: Partition,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size = 0,
        output_padding: Size = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Size = 1,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        weights: Weights = "replicated",
    ) -> None:
        self.output_padding = per_dim(output_padding, self.dims, "output_padding")
        super().__init__(
            P_x, in_channels, out_channels, kernel_size, stride,
            per_dim(padding, self.dims, "padding"), "zeros", dilation, groups, bias, False,
            device=device, dtype=dtype, weights=weights,
        )  # fmt: skip

    def _space_plan(self, cuts: Cuts) -> SpacePlan:
        P = self.P_x
        return transposed_plan(self.settings, cuts, index_in(P), P.root, P.ranks)


class DistributedFeatureConvTranspose1d(_FeatureConvTranspose):
    """`torch.nn.ConvTranspose1d` of a tensor `(N, C, L)` split in N and L."""

    dims = 1


class DistributedFeatureConvTranspose2d(_FeatureConvTranspose):
    """`torch.nn.ConvTranspose2d` of a tensor `(N, C, H, W)` split in N, H and W."""

    dims = 2


class DistributedFeatureConvTranspose3d(_FeatureConvTranspose):
    """`torch.nn.ConvTranspose3d` of a tensor `(N, C, D, H, W)` split in N, D, H and W."""

    dims = 3
