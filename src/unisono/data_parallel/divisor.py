"""By what a loss and its gradients are divided: seen in check mode, where a mean is taken twice."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from unisono.torch_private import on_backward

_SAMPLE = 64
"""Number of elements of a gradient that are remembered."""


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
    """Return by what numbers a loss was divided last.

    >>> x = torch.ones(3, requires_grad=True)
    >>> divisor_of(x.mean() / 4), divisor_of(0.5 * x.mean() / 2), divisor_of(x.mean())
    (4.0, 4.0, 1.0)
    """
    product = 1.0
    for node in _chain(loss):
        other = getattr(node, "_saved_other", None)
        if not isinstance(other, Tensor) or other.numel() != 1 or other.is_complex():
            break
        number = float(other)
        if number == 0:
            break
        product *= number if node.name() == "DivBackward0" else 1 / number
    return product if product > 1 else 1.0


def _chain(loss: Tensor) -> Iterator[Any]:
    """Yield the products and quotients by a number that a loss ends with, the last one first."""
    node: Any = loss.grad_fn
    while node is not None and node.name() in ("DivBackward0", "MulBackward0"):
        yield node
        node = node.next_functions[0][0]


def _some(p: nn.Parameter) -> Tensor:
    grad = p.grad
    return torch.empty(0) if grad is None else grad.detach().reshape(-1)[:_SAMPLE]
