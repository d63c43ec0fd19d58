"""HeAT's `optim.lr_scheduler`: every name is that of `torch.optim.lr_scheduler`."""

from __future__ import annotations

import torch.optim.lr_scheduler

from unisono.compat.heat.falling_through import fall_through

__getattr__, __dir__ = fall_through(__name__, torch.optim.lr_scheduler)
