"""Clearing gradients that live in buckets: one fill a bucket, after what is under way came back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import optim

if TYPE_CHECKING:
    from unisono.data_parallel.engine import GradientEngine


@torch.no_grad()
def clear_gradients(engine: GradientEngine, optimizer: optim.Optimizer, set_to_none: bool) -> None:
    """Do what `optimizer.zero_grad(set_to_none)` does. Local.

    Args:
        engine: the owner of the buckets. Those that a failed backward left under way are waited
            for, or they would come back over the zeros.
        optimizer: only its parameters are cleared.
        set_to_none: whether no gradient is left, not even zeros.
    """
    engine.under_way.wait_all()
    rest = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    for bucket in engine.gradient_buckets:
        if all(id(p) in rest for p in bucket.params):
            bucket.clear(set_to_none)
            for p in bucket.params:
                del rest[id(p)]
    for p in rest.values():
        if p.grad is not None:
            p.grad = None if set_to_none else p.grad.detach().zero_()
