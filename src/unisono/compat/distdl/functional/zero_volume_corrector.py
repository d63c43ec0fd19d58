"""DistDL's `functional.zero_volume_corrector`: something to call `backward()` on, everywhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class ZeroVolumeCorrectorFunction(torch.autograd.Function):
    """A tensor without elements becomes the number 0; any other is copied.

    >>> ZeroVolumeCorrectorFunction.apply(torch.empty(3, 0))
    tensor(0.)
    """

    @staticmethod
    def forward(input: Tensor) -> Tensor:
        """Return 0.0 or a copy."""
        return input.clone() if input.numel() else input.new_zeros(())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:  # noqa: ARG004
        """Remember the shape of a tensor without elements."""
        ctx.empty = None if inputs[0].numel() else inputs[0].shape

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        """Pass the gradient on, or one without elements."""
        return grad.clone() if ctx.empty is None else grad.new_empty(ctx.empty)
