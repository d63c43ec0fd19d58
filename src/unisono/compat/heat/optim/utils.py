"""HeAT's `optim.utils`."""

from __future__ import annotations

from unisono.data_parallel import DetectMetricPlateau

__all__ = ["DetectMetricPlateau"]
