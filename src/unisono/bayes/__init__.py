"""Networks of means and variances: predictions with error bars from one training run.

Every weight and unit is a Gaussian. Forward moves means and variances, an observation conditions
the output, backward carries the correction to every weight, `step` applies it (TAGI).
"""

from __future__ import annotations

from unisono.bayes import cuda, metric
from unisono.bayes.data import HRCSoftmax, Normalizer, Utils, batches, exponential_scheduler
from unisono.bayes.ddp import DDPConfig, DDPSequential
from unisono.bayes.energy import EnergyHead
from unisono.bayes.layers.activation import (
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
from unisono.bayes.layers.attention import MultiheadAttention
from unisono.bayes.layers.base import BaseLayer
from unisono.bayes.layers.blocks import LayerBlock, ResNetBlock
from unisono.bayes.layers.convolution import Conv2d, ConvTranspose2d
from unisono.bayes.layers.embedding import Embedding
from unisono.bayes.layers.linear import Linear, SLinear
from unisono.bayes.layers.lstm import LSTM, SLSTM
from unisono.bayes.layers.normalization import BatchNorm2d, LayerNorm, RMSNorm
from unisono.bayes.layers.window import AvgPool2d, MaxPool2d
from unisono.bayes.metric import HRCSoftmaxMetric
from unisono.bayes.moments import BaseDeltaStates, BaseHiddenStates
from unisono.bayes.parameters import manual_seed
from unisono.bayes.sequential import Sequential
from unisono.bayes.torch_bridge import from_torch, to_torch
from unisono.bayes.updater import OutputUpdater

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
    "EnergyHead",
    "EvenExp",
    "HRCSoftmax",
    "HRCSoftmaxMetric",
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
    "Normalizer",
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
    "Utils",
    "batches",
    "cuda",
    "exponential_scheduler",
    "from_torch",
    "manual_seed",
    "metric",
    "to_torch",
]
