"""pytagi's `nn.slinear` module."""

from __future__ import annotations

from unisono.bayes import SLinear

__all__ = [
    "SLinear",
]
