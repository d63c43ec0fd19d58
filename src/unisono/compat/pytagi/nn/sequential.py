"""pytagi's `nn.sequential` module."""

from __future__ import annotations

from unisono.bayes import Sequential

__all__ = [
    "Sequential",
]
