"""pytagi's `nn.linear` module."""

from __future__ import annotations

from unisono.bayes import Linear

__all__ = [
    "Linear",
]
