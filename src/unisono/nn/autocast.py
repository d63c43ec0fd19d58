"""Sums of partial products under autocast: one dtype, on ranks that compute no part of it too."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from unisono.operators.partitioned import FanPlan, collect

_CAST = (torch.float32, torch.float16, torch.bfloat16)


def collect_products(x: Tensor, plan: FanPlan) -> Tensor:
    """Return on each root the sum of its peers' products. Collective over the fans of the plan.

    Args:
        x: own product; a tensor without elements on a rank that computes none.
        plan: made for the dtype of the factors; under autocast, products have another.
    """
    device = x.device.type
    if plan.dtype in _CAST and torch.is_autocast_enabled(device):
        plan = replace(plan, dtype=torch.get_autocast_dtype(device))
    return collect(x.to(plan.dtype), plan)
