"""pytagi's `nn.output_updater` module."""

from __future__ import annotations

from unisono.bayes import OutputUpdater

__all__ = [
    "OutputUpdater",
]
