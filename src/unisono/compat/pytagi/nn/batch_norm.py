"""pytagi's `nn.batch_norm` module."""

from __future__ import annotations

from unisono.bayes import BatchNorm2d

__all__ = [
    "BatchNorm2d",
]
