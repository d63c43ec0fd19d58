"""pytagi's `nn` package: every layer, `Sequential`, the updater, data-parallel training."""

from __future__ import annotations

import difflib
from typing import NoReturn

from .activation import (
    ClosedFormSoftmax,
    EvenExp,
    LeakyReLU,
    MixtureReLU,
    MixtureSigmoid,
    MixtureTanh,
    ReLU,
    Remax,
    Sigmoid,
    Softmax,
    Softplus,
    Tanh,
)
from .attention import MultiheadAttention
from .base_layer import BaseLayer
from .batch_norm import BatchNorm2d
from .conv2d import Conv2d
from .convtranspose2d import ConvTranspose2d
from .data_struct import BaseDeltaStates, BaseHiddenStates, HRCSoftmax
from .ddp import DDPConfig, DDPSequential
from .embedding import Embedding
from .layer_block import LayerBlock
from .layer_norm import LayerNorm
from .linear import Linear
from .lstm import LSTM
from .output_updater import OutputUpdater
from .pooling import AvgPool2d, MaxPool2d
from .resnet_block import ResNetBlock
from .rms_norm import RMSNorm
from .sequential import Sequential
from .slinear import SLinear
from .slstm import SLSTM

__all__ = [
    "AvgPool2d",
    "BaseDeltaStates",
    "BaseHiddenStates",
    "BaseLayer",
    "BatchNorm2d",
    "ClosedFormSoftmax",
    "Conv2d",
    "ConvTranspose2d",
    "DDPConfig",
    "DDPSequential",
    "Embedding",
    "EvenExp",
    "HRCSoftmax",
    "LSTM",
    "LayerBlock",
    "LayerNorm",
    "LeakyReLU",
    "Linear",
    "MaxPool2d",
    "MixtureReLU",
    "MixtureSigmoid",
    "MixtureTanh",
    "MultiheadAttention",
    "OutputUpdater",
    "RMSNorm",
    "ReLU",
    "Remax",
    "ResNetBlock",
    "SLSTM",
    "SLinear",
    "Sequential",
    "Sigmoid",
    "Softmax",
    "Softplus",
    "Tanh",
]


def __getattr__(name: str) -> NoReturn:
    """Say what is not offered."""
    near = difflib.get_close_matches(name, __all__) or __all__
    raise AttributeError(
        f"{__name__} has no {name!r}: it offers the layers of pytagi 0.2.1\n"
        f"  HINT: {', '.join(near)}; the same classes are in unisono.bayes"
    )
