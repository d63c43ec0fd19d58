"""HeAT's `optim.dp_optimizer`."""

from __future__ import annotations

from unisono.data_parallel import DASO, DataParallelOptimizer

__all__ = ["DASO", "DataParallelOptimizer"]
