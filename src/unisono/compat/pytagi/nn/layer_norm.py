"""pytagi's `nn.layer_norm` module."""

from __future__ import annotations

from unisono.bayes import LayerNorm

__all__ = [
    "LayerNorm",
]
