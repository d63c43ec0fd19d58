"""pytagi's `nn.attention` module."""

from __future__ import annotations

from unisono.bayes import MultiheadAttention

__all__ = [
    "MultiheadAttention",
]
