"""HeAT's `nn.functional`: every name is that of `torch.nn.functional`."""

from __future__ import annotations

import torch.nn.functional

from unisono.compat.heat.falling_through import fall_through

__getattr__, __dir__ = fall_through(__name__, torch.nn.functional)
