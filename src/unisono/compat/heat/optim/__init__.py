"""HeAT's `optim`: the data parallel optimizers; every other name is that of `torch.optim`."""

from __future__ import annotations

import torch.optim

from unisono.compat.heat.falling_through import fall_through
from unisono.compat.heat.optim import dp_optimizer, lr_scheduler, utils
from unisono.compat.heat.optim.dp_optimizer import DASO, DataParallelOptimizer

__all__ = ["DASO", "DataParallelOptimizer", "dp_optimizer", "lr_scheduler", "utils"]

__getattr__, __dir__ = fall_through(__name__, torch.optim)
