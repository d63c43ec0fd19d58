"""Running an optimizer on some of its parameters, with hyper-parameters as they once were."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, optim
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

Hook = TypeVar("Hook", bound=Callable[..., None])

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
"""Optimizers that treat each parameter on its own: no counter in a group, no norm over all. A step
on some parameters, and later on the others, gives the bits of one step on all of them."""

_OBSERVES = "_only_observes_steps"

Frozen = list[dict[str, Any]]
"""Hyper-parameters of each group at some time."""


def is_per_parameter(optimizer: optim.Optimizer) -> bool:
    """Whether a step may be taken parameter by parameter.

    By the very class: a subclass, and an optimizer from elsewhere, may keep what it learns in its
    groups (Prodigy, D-Adaptation, schedule-free) or look at all gradients together.
    """
    return type(optimizer) in _PER_PARAMETER


def only_observes(hook: Hook) -> Hook:
    """Mark a step hook that looks neither at parameters nor at gradients.

    Such a hook is called once for every `step()`, also for one that is carried out later, layer by
    layer. For any other hook a step waits until all gradients are there.
    """
    setattr(hook, _OBSERVES, True)
    return hook


def is_watched(optimizer: optim.Optimizer, own_hook: int) -> bool:
    """Whether somebody may tell a step in parts from a whole one: hooks, another `step`.

    Args:
        optimizer: with one step hook of ours.
        own_hook: the id of that.
    """
    patched = vars(optimizer).get("step")
    return bool(
        any(key != own_hook for key in optimizer._optimizer_step_pre_hooks)
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or any(not hasattr(hook, _OBSERVES) for hook in _global_optimizer_post_hooks.values())
        or (patched is not None and not hasattr(patched, "_wrapped_by_lr_sched"))
    )


def tell_observers(optimizer: optim.Optimizer) -> None:
    """Tell those that only want to know of a step that one was asked for."""
    for hook in list(_global_optimizer_post_hooks.values()):
        hook(optimizer, (), {})


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


@contextlib.contextmanager
def _groups(optimizer: optim.Optimizer, frozen: Frozen, wanted: set[int]) -> Iterator[None]:
    """Show the optimizer other groups for a moment."""
    groups = optimizer.param_groups
    shown: list[dict[str, Any]] = []
    for group, values in zip(groups, frozen, strict=True):
        params = [p for p in group["params"] if id(p) in wanted]
        if params:
            shown.append({"params": params, **values})
    optimizer.param_groups = shown
    try:
        with torch.no_grad():
            yield
    finally:
        optimizer.param_groups = groups
