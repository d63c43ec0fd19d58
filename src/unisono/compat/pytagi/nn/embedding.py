"""pytagi's `nn.embedding` module."""

from __future__ import annotations

from unisono.bayes import Embedding

__all__ = [
    "Embedding",
]
