"""DistDL's `nn.conv_channel`: convolutions split in channels."""

from __future__ import annotations

from unisono import nn as ours

from .conv_general import GeneralConv
from .module import Module

__all__ = ["DistributedChannelConv1d", "DistributedChannelConv2d", "DistributedChannelConv3d"]


class DistributedChannelConv1d(GeneralConv, ours.DistributedChannelConv1d, Module):
    """`torch.nn.Conv1d` of a tensor split in channels."""


class DistributedChannelConv2d(GeneralConv, ours.DistributedChannelConv2d, Module):
    """`torch.nn.Conv2d` of a tensor split in channels."""


class DistributedChannelConv3d(GeneralConv, ours.DistributedChannelConv3d, Module):
    """`torch.nn.Conv3d` of a tensor split in channels."""
