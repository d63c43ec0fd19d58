"""pytagi's `nn.ddp` module."""

from __future__ import annotations

from unisono.bayes import DDPConfig, DDPSequential

__all__ = [
    "DDPConfig",
    "DDPSequential",
]
