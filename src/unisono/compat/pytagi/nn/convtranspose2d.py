"""pytagi's `nn.convtranspose2d` module."""

from __future__ import annotations

from unisono.bayes import ConvTranspose2d

__all__ = [
    "ConvTranspose2d",
]
