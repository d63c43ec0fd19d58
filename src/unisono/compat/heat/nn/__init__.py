"""HeAT's `nn`: the data parallel wrappers; every other name is that of `torch.nn`."""

from __future__ import annotations

import torch.nn

from unisono.compat.heat.falling_through import fall_through
from unisono.compat.heat.nn import data_parallel, functional
from unisono.data_parallel import DataParallel, DataParallelMultiGPU

__all__ = ["DataParallel", "DataParallelMultiGPU", "data_parallel", "functional"]

__getattr__, __dir__ = fall_through(__name__, torch.nn)
