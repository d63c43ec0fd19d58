"""Distributed layers: tensors cut into blocks over a grid of ranks, layers that equal torch's.

Each layer is called by all ranks of its partitions with their blocks and gives each its block of
the result. Built on `Module`, which sets layers up lazily, together, and never on some ranks only.
"""

from __future__ import annotations

from unisono.nn import functional
from unisono.nn.batch_norm import DistributedBatchNorm
from unisono.nn.class_loss import DistributedCrossEntropyLoss, DistributedNLLLoss
from unisono.nn.conv import DistributedConv1d, DistributedConv2d, DistributedConv3d
from unisono.nn.conv_feature import (
    DistributedFeatureConv1d,
    DistributedFeatureConv2d,
    DistributedFeatureConv3d,
)
from unisono.nn.conv_general import (
    DistributedChannelConv1d,
    DistributedChannelConv2d,
    DistributedChannelConv3d,
    DistributedGeneralConv1d,
    DistributedGeneralConv2d,
    DistributedGeneralConv3d,
)
from unisono.nn.conv_transpose import (
    DistributedFeatureConvTranspose1d,
    DistributedFeatureConvTranspose2d,
    DistributedFeatureConvTranspose3d,
)
from unisono.nn.distribute import DistributedSequential, distribute
from unisono.nn.embedding import DistributedEmbedding
from unisono.nn.gradient_norm import clip_grad_norm_
from unisono.nn.group_norm import DistributedGroupNorm
from unisono.nn.halo_layers import DistributedPad, HaloExchange
from unisono.nn.instance_norm import DistributedInstanceNorm
from unisono.nn.layer_norm import DistributedLayerNorm
from unisono.nn.linear import (
    DistributedLinear,
    DistributedLinearAllGather,
    DistributedLinearReduceScatter,
)
from unisono.nn.loss import (
    DistributedBCELoss,
    DistributedBCEWithLogitsLoss,
    DistributedKLDivLoss,
    DistributedL1Loss,
    DistributedMSELoss,
    DistributedPoissonNLLLoss,
)
from unisono.nn.module import Module
from unisono.nn.movement import (
    AllGather,
    AllSumReduce,
    Broadcast,
    ReduceScatter,
    SumReduce,
)
from unisono.nn.plan_report import plan_report
from unisono.nn.pooling import (
    DistributedAvgPool1d,
    DistributedAvgPool2d,
    DistributedAvgPool3d,
    DistributedMaxPool1d,
    DistributedMaxPool2d,
    DistributedMaxPool3d,
)
from unisono.nn.repartition import DistributedTranspose, Repartition
from unisono.nn.split_tensors import Split, SplitModule, split, split_rule
from unisono.nn.state import Shard, check_replicas, full_state_dict, no_sync, state_dict_mode
from unisono.nn.structure import structure_check
from unisono.nn.upsampling import DistributedUpsample, Interpolate

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
    "DistributedSequential",
    "DistributedTranspose",
    "DistributedUpsample",
    "HaloExchange",
    "Interpolate",
    "Module",
    "ReduceScatter",
    "Repartition",
    "Shard",
    "Split",
    "SplitModule",
    "SumReduce",
    "check_replicas",
    "clip_grad_norm_",
    "distribute",
    "full_state_dict",
    "functional",
    "no_sync",
    "plan_report",
    "split",
    "split_rule",
    "state_dict_mode",
    "structure_check",
]
