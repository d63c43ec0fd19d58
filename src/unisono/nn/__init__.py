"""Distributed layers: tensors cut into blocks over a grid of ranks, layers that equal torch's.

Each layer is called by all ranks of its partitions with their blocks and gives each its block of
the result. Built on `Module`, which sets layers up lazily, together, and never on some ranks only.
"""

from __future__ import annotations

from unisono.nn import functional
from unisono.nn.agreement import structure_check
from unisono.nn.gradients import clip_grad_norm_
from unisono.nn.layers.conv import (
    DistributedChannelConv1d,
    DistributedChannelConv2d,
    DistributedChannelConv3d,
    DistributedConv1d,
    DistributedConv2d,
    DistributedConv3d,
    DistributedFeatureConv1d,
    DistributedFeatureConv2d,
    DistributedFeatureConv3d,
    DistributedFeatureConvTranspose1d,
    DistributedFeatureConvTranspose2d,
    DistributedFeatureConvTranspose3d,
    DistributedGeneralConv1d,
    DistributedGeneralConv2d,
    DistributedGeneralConv3d,
)
from unisono.nn.layers.embedding import DistributedEmbedding
from unisono.nn.layers.halo import DistributedPad, HaloExchange
from unisono.nn.layers.linear import (
    DistributedLinear,
    DistributedLinearAllGather,
    DistributedLinearReduceScatter,
)
from unisono.nn.layers.loss import (
    DistributedBCELoss,
    DistributedBCEWithLogitsLoss,
    DistributedCrossEntropyLoss,
    DistributedKLDivLoss,
    DistributedL1Loss,
    DistributedMSELoss,
    DistributedNLLLoss,
    DistributedPoissonNLLLoss,
)
from unisono.nn.layers.movement import (
    AllGather,
    AllSumReduce,
    Broadcast,
    DistributedTranspose,
    ReduceScatter,
    Repartition,
    SumReduce,
)
from unisono.nn.layers.norm import (
    DistributedBatchNorm,
    DistributedGroupNorm,
    DistributedInstanceNorm,
    DistributedLayerNorm,
    DistributedRMSNorm,
)
from unisono.nn.layers.pooling import (
    DistributedAvgPool1d,
    DistributedAvgPool2d,
    DistributedAvgPool3d,
    DistributedMaxPool1d,
    DistributedMaxPool2d,
    DistributedMaxPool3d,
)
from unisono.nn.layers.upsampling import DistributedUpsample
from unisono.nn.module import Module
from unisono.nn.parameters import Shard, state_dict_mode
from unisono.nn.split_tensors import Split, SplitModule, split, split_rule
from unisono.nn.state import check_replicas, full_state_dict, no_sync
from unisono.removed import removed_name

__all__ = [
    "AllGather",
    "AllSumReduce",
    "Broadcast",
    "DistributedAvgPool1d",
    "DistributedAvgPool2d",
    "DistributedAvgPool3d",
    "DistributedBCELoss",
    "DistributedBCEWithLogitsLoss",
    "DistributedBatchNorm",
    "DistributedChannelConv1d",
    "DistributedChannelConv2d",
    "DistributedChannelConv3d",
    "DistributedConv1d",
    "DistributedConv2d",
    "DistributedConv3d",
    "DistributedCrossEntropyLoss",
    "DistributedEmbedding",
    "DistributedFeatureConv1d",
    "DistributedFeatureConv2d",
    "DistributedFeatureConv3d",
    "DistributedFeatureConvTranspose1d",
    "DistributedFeatureConvTranspose2d",
    "DistributedFeatureConvTranspose3d",
    "DistributedGeneralConv1d",
    "DistributedGeneralConv2d",
    "DistributedGeneralConv3d",
    "DistributedGroupNorm",
    "DistributedInstanceNorm",
    "DistributedKLDivLoss",
    "DistributedL1Loss",
    "DistributedLayerNorm",
    "DistributedLinear",
    "DistributedLinearAllGather",
    "DistributedLinearReduceScatter",
    "DistributedMSELoss",
    "DistributedMaxPool1d",
    "DistributedMaxPool2d",
    "DistributedMaxPool3d",
    "DistributedNLLLoss",
    "DistributedPad",
    "DistributedPoissonNLLLoss",
    "DistributedRMSNorm",
    "DistributedTranspose",
    "DistributedUpsample",
    "HaloExchange",
    "Module",
    "ReduceScatter",
    "Repartition",
    "Shard",
    "Split",
    "SplitModule",
    "SumReduce",
    "check_replicas",
    "clip_grad_norm_",
    "full_state_dict",
    "functional",
    "no_sync",
    "split",
    "split_rule",
    "state_dict_mode",
    "structure_check",
]


def __getattr__(name: str) -> object:
    """Raise for a name that is gone, with what to write instead."""
    raise removed_name(f"{__name__}.{name}")
