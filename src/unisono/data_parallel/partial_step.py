"""Running an optimizer on some of its parameters, with hyper-parameters as they once were."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, optim
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

_PER_PARAMETER: frozenset[type] = frozenset(
    {
        optim.SGD,
        optim.Adam,
        optim.AdamW,
        optim.Adamax,
        optim.NAdam,
        optim.RAdam,
        optim.Adagrad,
        optim.Adadelta,
        optim.RMSprop,
        optim.Rprop,
        optim.ASGD,
        optim.Adafactor,
        optim.SparseAdam,
    }
)
"""Optimizers that treat each parameter on its own."""

Frozen = list[dict[str, Any]]
"""Hyper-parameters of each group at some time."""


def is_divisible(optimizer: optim.Optimizer, own_hook: int) -> bool:
    """Whether a step may be taken parameter by parameter: nobody can tell the difference.

    Args:
        optimizer: with one step hook of ours.
        own_hook: the id of that.
    """
    has_hooks = (
        any(key != own_hook for key in optimizer._optimizer_step_pre_hooks)
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
    )
    return type(optimizer) in _PER_PARAMETER and not has_hooks


def needs_closure(optimizer: optim.Optimizer) -> bool:
    """Whether `step` evaluates the loss itself."""
    return isinstance(optimizer, optim.LBFGS)


def freeze(optimizer: optim.Optimizer) -> Frozen:
    """Return the hyper-parameters of all groups as they are now."""
    return [
        {
            key: value.clone() if isinstance(value, Tensor) else value
            for key, value in group.items()
            if key != "params"
        }
        for group in optimizer.param_groups
    ]


def step_some(optimizer: optim.Optimizer, wanted: set[int], frozen: Frozen) -> None:
    """Update the parameters with these ids, with the frozen hyper-parameters. No hooks run."""
    function = type(optimizer).step
    bare = getattr(function, "__wrapped__", function) if hasattr(function, "hooked") else function
    with _groups(optimizer, frozen, wanted):
        if optimizer.param_groups:
            bare(optimizer)


def step_all(optimizer: optim.Optimizer, frozen: Frozen) -> None:
    """Take a whole step with the frozen hyper-parameters, hooks included."""
    with _groups(optimizer, frozen, None):
        optimizer.step()


@contextlib.contextmanager
def _groups(optimizer: optim.Optimizer, frozen: Frozen, wanted: set[int] | None) -> Iterator[None]:
    """Show the optimizer other groups for a moment."""
    groups = optimizer.param_groups
    shown: list[dict[str, Any]] = []
    for group, values in zip(groups, frozen, strict=True):
        params = [p for p in group["params"] if wanted is None or id(p) in wanted]
        if params:
            shown.append({"params": params, **values})
    optimizer.param_groups = shown
    try:
        with torch.no_grad():
            yield
    finally:
        optimizer.param_groups = groups
