"""By what a loss and its gradients are divided: seen in check mode, where a mean is taken twice."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from unisono.torch_private import on_backward

_SAMPLE = 64
"""Number of elements of a gradient that are remembered."""
_SUM = 2
"""torch's number for `reduction="sum"`."""


class Divisor:
    """Follows the losses and gradients of a training. Local."""

    def __init__(self) -> None:
        self._of_loss = self._of_gradient = 1.0
        self._delivered: tuple[nn.Parameter, Tensor] | None = None
        itself = weakref.ref(self)

        def see_backward(roots: Sequence[Tensor]) -> None:
            if (divisor := itself()) is not None:
                divisor._of_loss = max(divisor_of(root) for root in roots)

        def see_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if (divisor := itself()) is not None:
                divisor._see_step(optimizer)

        hook = register_optimizer_step_pre_hook(see_step)
        weakref.finalize(self, hook.remove).atexit = False
        weakref.finalize(self, on_backward(see_backward)).atexit = False

    def remember(self, params: Sequence[nn.Parameter]) -> None:
        """Note the averaged gradients, before the program can change them."""
        p = next((p for p in params if p.grad is not None and not p.grad.is_sparse), None)
        self._delivered = None if p is None else (p, _some(p).clone())

    def take(self) -> int:
        """Return by what this step was divided, loss and gradient of the step before together."""
        product, self._of_loss = self._of_loss * self._of_gradient, 1.0
        self._of_gradient = 1.0
        nearest = round(product)
        return nearest if abs(product - nearest) < 1e-4 * product else 1

    def _see_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Compare gradients with those that were delivered: has the program divided them?"""
        delivered, self._delivered = self._delivered, None
        if delivered is None or delivered[0].grad is None:
            return
        p, before = delivered
        if not any(other is p for group in optimizer.param_groups for other in group["params"]):
            return
        after = _some(p)
        if torch.equal(before, after):
            return
        used = before != 0
        if not bool(used.any()) or bool((after[used] == 0).any()):
            return
        ratios = (before[used] / after[used]).double()
        middle = float(ratios.median())
        if middle > 1.5 and bool(((ratios - middle).abs() < 1e-3 * middle).all()):
            self._of_gradient = middle


def divisor_of(loss: Tensor) -> float:
    """Return by what a loss was divided last, besides what makes a mean of a sum.

    Factors do not count: 0.5 belongs to many a loss.

    >>> x = torch.ones(6, 3, requires_grad=True)
    >>> divisor_of(x.mean() / 4), divisor_of(0.5 * x.mean() / 2), divisor_of(x.mean())
    (4.0, 2.0, 1.0)
    >>> divisor_of(x.sum() / 6), divisor_of(x.sum() / 6 / 4), divisor_of((x.sum() + x.mean()) / 2)
    (1.0, 4.0, 1.0)
    """
    product, node = 1.0, loss.grad_fn
    while node is not None and node.name() in ("DivBackward0", "MulBackward0"):
        other = getattr(node, "_saved_other", None)
        if not isinstance(other, Tensor) or other.numel() != 1 or other.is_complex():
            break
        if node.name() == "DivBackward0":
            product *= float(other)
        node = node.next_functions[0][0]
    of_sum = next((n for n in _lengths(node) if product % n == 0), 1)
    return max(1.0, product / of_sum)


def _lengths(node: Any) -> list[int]:
    """Return what turns the sum at a node into a mean, the largest number first."""
    if node is None:
        return []
    if node.name() == "AddBackward0":
        return [sum(1 for _ in _terms(node))]
    if node.name() == "SumBackward0":
        shape = list(node._saved_self_sym_sizes)
    elif getattr(node, "_saved_reduction", 0) == _SUM:
        shape = list(node._saved_self.shape)
    else:
        return []
    rows = shape[0] if shape else 1
    return sorted({math.prod(shape), rows, math.prod(shape[1:])} - {0}, reverse=True)


def _terms(node: Any) -> Iterator[Any]:
    if node is not None and node.name() == "AddBackward0":
        for part, _ in node.next_functions:
            yield from _terms(part)
    else:
        yield node


def _some(p: nn.Parameter) -> Tensor:
    grad = p.grad
    return torch.empty(0) if grad is None else grad.detach().reshape(-1)[:_SAMPLE]
