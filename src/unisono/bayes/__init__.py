"""Networks of means and variances: predictions with error bars from one training run.

Every weight and unit is a Gaussian. Forward moves means and variances, an observation conditions
the output, backward carries the correction to every weight, `step` applies it (TAGI).
"""

from __future__ import annotations

from unisono.bayes import cuda, metric
from unisono.bayes.activation import (
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
from unisono.bayes.attention import MultiheadAttention
from unisono.bayes.base_layer import BaseLayer
from unisono.bayes.batching import batches
from unisono.bayes.blocks import LayerBlock, ResNetBlock
from unisono.bayes.convolution import Conv2d, ConvTranspose2d
from unisono.bayes.ddp import DDPSequential
from unisono.bayes.ddp_config import DDPConfig
from unisono.bayes.drawing import manual_seed
from unisono.bayes.embedding import Embedding
from unisono.bayes.hierarchical import HRCSoftmax
from unisono.bayes.linear import Linear
from unisono.bayes.lstm import LSTM
from unisono.bayes.metric import HRCSoftmaxMetric
from unisono.bayes.normalization import BatchNorm2d, LayerNorm, RMSNorm
from unisono.bayes.normalizer import Normalizer, exponential_scheduler
from unisono.bayes.output_updater import OutputUpdater
from unisono.bayes.pooling import AvgPool2d, MaxPool2d
from unisono.bayes.sequential import Sequential
from unisono.bayes.slstm import SLSTM, SLinear
from unisono.bayes.states import BaseDeltaStates, BaseHiddenStates
from unisono.bayes.toolbox import Utils
from unisono.bayes.torch_bridge import from_torch
from unisono.bayes.torch_means import to_torch

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
