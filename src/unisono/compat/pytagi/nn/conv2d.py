"""pytagi's `nn.conv2d` module."""

from __future__ import annotations

from unisono.bayes import Conv2d

__all__ = [
    "Conv2d",
]
