"""pytagi's `nn.rms_norm` module."""

from __future__ import annotations

from unisono.bayes import RMSNorm

__all__ = [
    "RMSNorm",
]
