"""`attach`: tie a tensor to another without changing its value, so that both run backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unisono.operators.linear import refuse_vmap


class Attach(torch.autograd.Function):
    """The first tensor, with a zero-gradient link to the second."""

    @staticmethod
    def forward(y: Tensor, token: Tensor) -> Tensor:
        """Return `y`."""
        return y.view_as(y)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        """Remember what the token looks like."""
        token = inputs[1]
        ctx.token = (tuple(token.shape), token.dtype, token.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Pass the gradient, and zeros to the token."""
        shape, dtype, device = ctx.token
        return grad, torch.zeros(shape, dtype=dtype, device=device)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, token_tangent: Tensor | None) -> Tensor:  # type: ignore[override]
        """Pass the tangent."""
        return tangent.view_as(tangent)

    vmap = staticmethod(refuse_vmap)


def attach(y: Tensor, token: Tensor) -> Tensor:
    """Return `y`, tied to `token`: the backward of `y` also runs the backward of `token`.

    Local. An operator whose result a rank does not need (the empty one of `gather`, the token of
    `send`) still has a collective backward; without this link that rank would not join it and the
    others would wait.
    """
    return Attach.apply(y, token)
