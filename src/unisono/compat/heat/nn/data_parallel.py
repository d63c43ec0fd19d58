"""HeAT's `nn.data_parallel`."""

from __future__ import annotations

from unisono.data_parallel import DataParallel, DataParallelMultiGPU

__all__ = ["DataParallel", "DataParallelMultiGPU"]
