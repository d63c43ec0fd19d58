"""pytagi's `nn.activation` module."""

from __future__ import annotations

from unisono.bayes import (
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

__all__ = [
    "ClosedFormSoftmax",
    "EvenExp",
    "LeakyReLU",
    "MixtureReLU",
    "MixtureSigmoid",
    "MixtureTanh",
    "ReLU",
    "Remax",
    "Sigmoid",
    "Softmax",
    "Softplus",
    "Tanh",
]
