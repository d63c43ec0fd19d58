"""pytagi's `nn.slstm` module."""

from __future__ import annotations

from unisono.bayes import SLSTM

__all__ = [
    "SLSTM",
]
