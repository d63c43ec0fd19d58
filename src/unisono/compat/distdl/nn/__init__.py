"""DistDL's `nn`: every layer, with its arguments and defaults, over the layers of `unisono.nn`."""

from __future__ import annotations

from typing import NoReturn

from . import loss, mixins
from .all_gather import AllGather
from .all_sum_reduce import AllSumReduce
from .batchnorm import DistributedBatchNorm
from .broadcast import Broadcast
from .conv import DistributedConv1d, DistributedConv2d, DistributedConv3d
from .conv_channel import (
    DistributedChannelConv1d,
    DistributedChannelConv2d,
    DistributedChannelConv3d,
)
from .conv_feature import (
    DistributedFeatureConv1d,
    DistributedFeatureConv2d,
    DistributedFeatureConv3d,
    DistributedFeatureConvTranspose1d,
    DistributedFeatureConvTranspose2d,
    DistributedFeatureConvTranspose3d,
)
from .conv_general import (
    DistributedGeneralConv1d,
    DistributedGeneralConv2d,
    DistributedGeneralConv3d,
)
from .embedding import DistributedEmbedding
from .halo_exchange import HaloExchange
from .interpolate import Interpolate
from .layernorm import DistributedLayerNorm
from .linear import DistributedLinear
from .linear_ag import DistributedLinearAllGather
from .linear_rs import DistributedLinearReduceScatter
from .loss import (
    DistributedBCELoss,
    DistributedBCEWithLogitsLoss,
    DistributedCrossEntropyLoss,
    DistributedKLDivLoss,
    DistributedL1Loss,
    DistributedMSELoss,
    DistributedNLLLoss,
    DistributedPoissonNLLLoss,
)
from .module import Module
from .pooling import (
    DistributedAvgPool1d,
    DistributedAvgPool2d,
    DistributedAvgPool3d,
    DistributedMaxPool1d,
    DistributedMaxPool2d,
    DistributedMaxPool3d,
)
from .reduce_scatter import ReduceScatter
from .repartition import Repartition
from .sum_reduce import SumReduce
from .transpose import DistributedTranspose
from .upsampling import DistributedUpsample

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
    "DistributedPoissonNLLLoss",
    "DistributedTranspose",
    "DistributedUpsample",
    "HaloExchange",
    "Interpolate",
    "Module",
    "ReduceScatter",
    "Repartition",
    "SumReduce",
    "loss",
    "mixins",
]

_INSTEAD = {
    "DistributedPad": "unisono.nn.DistributedPad(backends.mpi.partition.layout_of(P_x), padding)",
    "PadNd": "torch.nn.functional.pad, or padding= of the layer",
    "UnpadNd": "slices of the tensor",
    "DistributedLinearAllGatherZero": "DistributedLinear, whose weight is split in both dims",
    "DistributedLinearReduceScatterZero": "DistributedLinear, whose weight is split in both dims",
    "DistributedLayerNormZero": "DistributedLayerNorm",
    "DistributedEmbeddingZero": "DistributedEmbedding",
}


def __getattr__(name: str) -> NoReturn:
    """Say what is not offered, and what does its work."""
    hint = _INSTEAD.get(name, "dir(unisono.compat.distdl.nn) lists what is offered")
    raise AttributeError(f"{__name__} has no {name!r}\n  HINT: {hint}")
