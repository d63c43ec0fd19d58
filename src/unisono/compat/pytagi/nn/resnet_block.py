"""pytagi's `nn.resnet_block` module."""

from __future__ import annotations

from unisono.bayes import ResNetBlock

__all__ = [
    "ResNetBlock",
]
