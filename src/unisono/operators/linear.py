"""The rule all operators follow: backward of a linear map is the Function of its adjoint.

An operator is a pair of maps written side by side. Since the backward of each is the other (itself
recorded), derivatives of every order run the same two kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from unisono import torch_private as private
from unisono.comm.arguments import vmapped


class LinearMap:
    """Base of the operators' maps, used as `Map.apply(x, plan)`.

    A subclass gives `kernel` (the map without autograd), and `set_adjoint` names the other class of
    its pair; its autograd Function follows. The plan holds ints, ranks and the communicator, never
    a tensor to differentiate. It serves the adjoint too, unless it has `adjoint`, the plan of the
    way back. The map of an affine kernel (a constant filled in) has a plan with `tangent`, which
    leaves the constant out.
    """

    adjoint: ClassVar[type[LinearMap]]
    """The class of the adjoint map."""
    function: ClassVar[Any]
    """The autograd Function of the map."""
    traced: ClassVar[Any]
    """The same Function without jvp and vmap, which torch.compile does not trace."""
    _recorded: ClassVar[Any]

    def __init_subclass__(cls) -> None:
        """Make the Functions from the kernel and the adjoint."""
        super().__init_subclass__()

        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            plan = getattr(ctx.plan, "adjoint", ctx.plan)
            return cls.adjoint.apply_in_backward(grad, plan), None

        def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
            return cls.apply(tangent, getattr(ctx.plan, "tangent", ctx.plan))

        common = {
            "__module__": cls.__module__,
            "forward": staticmethod(cls.kernel),
            "setup_context": staticmethod(_keep_plan),
            "backward": staticmethod(backward),
        }
        transforms = {"jvp": staticmethod(jvp), "vmap": staticmethod(refuse_vmap)}
        base = (torch.autograd.Function,)
        cls.function = type(cls.__name__, base, common | transforms)
        cls.traced = type(cls.__name__, base, common)
        # What `Function.apply` ends in when no transform of torch.func is active. Before that it
        # looks up the signature of `forward`, which takes longer than a small collective.
        in_c: Any = super(torch.autograd.Function, cls.function)
        cls._recorded = in_c.apply

    @staticmethod
    def kernel(x: Tensor, plan: Any) -> Tensor:
        """Return the image of `x`: a new tensor, `x` unchanged."""
        raise TypeError(f"a LinearMap without a kernel was applied to {x.shape} with {plan}")

    @classmethod
    @private.traced_if_right
    def apply(cls, x: Tensor, plan: Any) -> Tensor:
        """Apply the map, recorded for autograd."""
        if torch.compiler.is_compiling():
            return cls.traced.apply(x, plan)
        if private.transforms_active():
            return cls.function.apply(x, plan)
        return cls._recorded(private.unwrap_if_dead(x), plan)

    @classmethod
    def apply_in_backward(cls, x: Tensor, plan: Any) -> Tensor:
        """Apply the map to a gradient; not recorded where nothing would come of it."""
        if not torch.compiler.is_compiling() and private.is_legacy_batchedtensor(x):
            refuse_vmap(None, None)  # a backward with is_grads_batched=True
        if torch.is_grad_enabled():
            return cls.apply(x, plan)
        return cls.kernel(x, plan)


def set_adjoint(forward: type[LinearMap], adjoint: type[LinearMap] | None = None) -> None:
    """Make two maps each other's adjoint; one alone is its own.

    >>> class Reverse(LinearMap):
    ...     @staticmethod
    ...     def kernel(x, plan):
    ...         return x.flip(0)
    >>> set_adjoint(Reverse)
    >>> Reverse.adjoint is Reverse
    True
    """
    back = forward if adjoint is None else adjoint
    forward.adjoint, back.adjoint = back, forward


class Attach(torch.autograd.Function):
    """The first tensor, with a zero-gradient link to the others."""

    @staticmethod
    def forward(y: Tensor, *tokens: Tensor) -> Tensor:
        """Return `y`."""
        return y.view_as(y)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Remember what the tokens look like."""
        ctx.tokens = [(tuple(token.shape), token.dtype, token.device) for token in inputs[1:]]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        """Pass the gradient, and zeros to the tokens."""
        zeros = (torch.zeros(shape, dtype=dtype, device=on) for shape, dtype, on in ctx.tokens)
        return grad, *zeros

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *token_tangents: Tensor | None) -> Tensor:  # type: ignore[override]
        """Pass the tangent."""
        return tangent.view_as(tangent)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> NoReturn:
        """Refuse."""
        refuse_vmap(info, in_dims, *arguments)


_attach: Any = super(torch.autograd.Function, Attach).apply  # type: ignore[misc]
"""What `Attach.apply` ends in without transforms; see `LinearMap`."""


def attach(y: Tensor, *tokens: Tensor) -> Tensor:
    """Return `y`, tied to `tokens`: the backward of `y` also runs the backward of each of them.

    Local. An operator whose result a rank does not need (the empty one of `gather`, the token of
    `send`) still has a collective backward; without this link that rank would not join it and the
    others would wait.
    """
    if torch.compiler.is_compiling() or private.transforms_active():
        return Attach.apply(y, *tokens)
    return _attach(private.unwrap_if_dead(y), *tokens)


def identity(x: Tensor) -> Tensor:
    """Return `x` as a new tensor of the same storage: what every operator is at one rank."""
    return x.view_as(x)


def slopes(
    compute: Callable[..., Tensor],
    inputs: Sequence[Tensor | None],
    needs: Sequence[bool],
    dy: Tensor,
) -> list[Tensor | None]:
    """Return the gradients of a Function whose backward is differentiated again, by autograd.

    Args:
        compute: the forward, of operations that autograd differentiates.
        inputs: what it takes.
        needs: of which of them a gradient is wanted; None is returned for the others.
        dy: gradient of its result.
    """
    # Of aliases: where an input was made from another one (a layer that is called twice), each
    # still has the slope of its own place alone.
    aliases = [None if t is None else identity(t) for t in inputs]
    with torch.enable_grad():
        y = compute(*aliases)
    sources = [t for t, needed in zip(aliases, needs, strict=True) if needed and t is not None]
    grads = iter(torch.autograd.grad(y, sources, dy, create_graph=True, allow_unused=True))
    return [next(grads) if needed else None for needed in needs]


def refuse_vmap(info: Any, in_dims: Any, *arguments: Any) -> NoReturn:
    """Raise: one collective per sample is never what is meant."""
    raise vmapped("a collective", "the operator")


def _keep_plan(ctx: Any, inputs: tuple[Tensor, Any], output: Tensor) -> None:
    ctx.plan = inputs[1]
