"""pytagi's `nn.layer_block` module."""

from __future__ import annotations

from unisono.bayes import LayerBlock

__all__ = [
    "LayerBlock",
]
