"""pytagi's `nn.base_layer` module."""

from __future__ import annotations

from unisono.bayes import BaseLayer

__all__ = [
    "BaseLayer",
]
