"""Rules for functions of the user's, and for the `autograd.Function`s that modules pass through.

Torch's hooks of modules and FSDP send tensors through an `autograd.Function` that returns them as
they are, to have a node in the graph. It gets blocks here, and its hooks see split tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from unisono import torch_private as private
from unisono.nn.split_tensors.blocks import fitted
from unisono.nn.split_tensors.dispatch import by_rule
from unisono.nn.split_tensors.rules import RULES, Rule, rule, set_user_rule
from unisono.nn.split_tensors.tensor import Split, splits_in


def split_rule(function: Callable[..., Any], how: Rule | str | None = None) -> Any:
    """Give a torch function, or one of your own, a rule for split tensors.

    Args:
        function: a function of torch, one that calls `torch.overrides.handle_torch_function`, or
            an `autograd.Function`, which is called as `function.apply` from then on.
        how: `"pointwise"` for a function whose result at a point needs its arguments there only,
            or the rule: called as `how(function, *args, **kwargs)` with `Split` arguments, it
            returns a `Split` (`Split(local, x.cuts, x.run)`) or a replicated tensor. Without it,
            this is a decorator.

    >>> from unisono.nn import split_rule
    >>> split_rule(torch.special.expit, "pointwise")
    """
    if how is None:
        return lambda rule: (split_rule(function, rule), rule)[1]
    if isinstance(how, str):
        if how != "pointwise":
            raise ValueError(f"split_rule(how={how!r}): 'pointwise', or a function")
        how = RULES["add"]
    if isinstance(function, type) and issubclass(function, torch.autograd.Function):
        _rule_of_apply(function, how)
        return None
    set_user_rule(function, how)
    return None


def _rule_of_apply(function: type[torch.autograd.Function], how: Rule) -> None:
    """Let an autograd.Function look for split tensors, which torch's own `apply` does not."""
    apply = function.apply

    @functools.wraps(apply)
    def with_rule(*args: Any) -> Any:
        if next(splits_in(args), None) is None:
            return apply(*args)
        with private.no_subclass():
            return by_rule(how, apply, function.__name__, args, {})

    function.apply = staticmethod(with_rule)


# -- hooks of modules, FSDP -----------------------------------------------------------------------


@functools.cache
def _take_splits(function: type[torch.autograd.Function]) -> None:
    _rule_of_apply(function, _passed_on)


def prepare_hooks() -> None:
    """Let the functions through which torch's modules pass tensors take split ones."""
    for function in private.functions_that_pass_on():
        _take_splits(function)


def _passed_on(apply: Callable[..., Any], *args: Any) -> Any:
    """Pass on the blocks of tensors; the node knows which split tensors they are of."""
    results = apply(*[x.local if isinstance(x, Split) else x for x in args])
    originals = [x for x in args if isinstance(x, Tensor)]
    passed = [
        Split(y, x.cuts, x.run) if isinstance(x, Split) else y
        for x, y in zip(originals, results, strict=True)
    ]
    for y in results:
        if y.grad_fn is not None:
            y.grad_fn.split_layouts = [
                (x.cuts, x.run) if isinstance(x, Split) else None for x in originals
            ]
            break
    return tuple(passed)


class _NodeOfBlocks:
    """A node in the graph of blocks, whose hooks see gradients as split tensors."""

    def __init__(self, node: Any) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)

    def register_hook(self, hook: Callable[..., Any]) -> Any:
        """Call `hook(grad_inputs, grad_outputs)` when the gradients have been computed."""
        layouts = self._node.split_layouts

        def of_blocks(*grads: Sequence[Tensor | None]) -> Any:
            changed = hook(*[_split_as(layouts, values) for values in grads])
            return None if changed is None else _blocks_as(layouts, changed)

        return self._node.register_hook(of_blocks)


def _split_as(layouts: Sequence[Any], grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    return tuple(
        grad if layout is None or grad is None else Split(grad, *layout)
        for layout, grad in zip(layouts, grads, strict=True)
    )


def _blocks_as(layouts: Sequence[Any], grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    blocks: list[Tensor | None] = []
    for layout, grad in zip(layouts, grads, strict=True):
        if layout is None or grad is None:
            blocks.append(grad)
            continue
        cuts, run = layout
        blocks.append(fitted(grad, {dim - grad.ndim: cut for dim, cut in cuts.items()}, run))
    return tuple(blocks)


@rule("grad_fn.get")
def _node_of_block(func: Callable[..., Any], x: Split) -> Any:
    node = func(x.local)
    return _NodeOfBlocks(node) if hasattr(node, "split_layouts") else node


@rule("__deepcopy__")
def _deep_copy(func: Callable[..., Any], x: Split, memo: dict[int, Any]) -> Split:
    copied = Split(func(x.local, memo), x.cuts, x.run)
    memo[id(x)] = copied
    return copied
