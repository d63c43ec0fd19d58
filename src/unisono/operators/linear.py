"""The rule all operators follow: backward of a linear map is the Function of its adjoint.

An operator is a pair of autograd Functions written side by side. Since the backward of each is the
other (itself recorded), derivatives of every order run the same two kernels.
"""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from unisono.errors import UnisonoError


class LinearMap(torch.autograd.Function):
    """Base of the operators' Functions, applied as `Map.apply(x, plan)`.

    A subclass gives `kernel` (the map without autograd) and `adjoint` (the other class of its
    pair); forward, backward and jvp follow. The plan holds ints, ranks and the communicator, and
    `plan.adjoint` is the plan of the adjoint.
    """

    adjoint: ClassVar[type[LinearMap]]
    """The class of the adjoint map."""

    @staticmethod
    def kernel(x: Tensor, plan: Any) -> Tensor:
        """Return the image of `x`: a new tensor, `x` unchanged."""
        raise TypeError(f"a LinearMap without a kernel was applied to {x.shape} with {plan}")

    def __init_subclass__(cls) -> None:
        """Derive the Function from the kernel and the adjoint."""
        super().__init_subclass__()

        def forward(x: Tensor, plan: Any) -> Tensor:
            return cls.kernel(x, plan)

        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
            return apply_linear(cls.adjoint, grads[0], ctx.plan.adjoint), None

        def jvp(ctx: Any, *tangents: Any) -> Tensor:
            return apply_linear(cls, tangents[0], ctx.plan)

        cls.forward = staticmethod(forward)
        cls.backward = staticmethod(backward)
        cls.jvp = staticmethod(jvp)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Any], output: Tensor) -> None:
        """Keep the plan; no tensor is saved."""
        ctx.plan = inputs[1]

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> NoReturn:
        """Refuse: one collective per sample is never what is meant."""
        raise UnisonoError.because(
            "torch.func.vmap over a collective",
            "a collective cannot be vmapped: ranks would not agree on the number of calls",
            None,
            "give the tensor a batch dim and call the operator once",
        )


def apply_linear(function: type[LinearMap], x: Tensor, plan: Any) -> Tensor:
    """Apply `function`; without the recording where nothing would be recorded."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return function.apply(x, plan)
    return function.kernel(x, plan)


def identity(x: Tensor) -> Tensor:
    """Return `x` as a new tensor of the same storage: what every operator is at one rank."""
    return x.view_as(x)
