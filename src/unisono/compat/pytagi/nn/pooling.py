"""pytagi's `nn.pooling` module."""

from __future__ import annotations

from unisono.bayes import AvgPool2d, MaxPool2d

__all__ = [
    "AvgPool2d",
    "MaxPool2d",
]
