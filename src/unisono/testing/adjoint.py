"""The dot-product test of a linear operator on distributed tensors: `<Fx, y> = <x, F*y>`.

The inner product depends on the kind of space: a replicated tensor ("R") counts once, blocks ("S")
and independent tensors ("I") are summed over ranks. A wrong sum or a missing one shows as a factor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from unisono.comm import Communicator
from unisono.comm.arguments import bytes_of
from unisono.errors import LayoutError
from unisono.expect import expect_choice
from unisono.testing.report import name_of, raise_together, raise_what_was_found

Space = Literal["R", "S", "I"]
"""Replicated, sharded, or independent on each rank."""

_RTOL = {
    torch.float64: 1e-10,
    torch.complex128: 1e-10,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
    torch.float16: 2e-2,
    torch.bfloat16: 1e-1,
}


def check_adjoint(
    forward: Callable[[Tensor], Tensor],
    adjoint: Callable[[Tensor], Tensor],
    x: Tensor,
    y: Tensor,
    *,
    comm: Communicator | None = None,
    domain: Space = "I",
    range: Space = "I",
    rtol: float | None = None,
    backward: bool = True,
    twice: bool = True,
) -> float:
    """Check that `adjoint` is the adjoint of the linear `forward`, also for autograd. Collective.

    Checked are: `<forward(x), y> = <x, adjoint(y)>`; replicated tensors are the same on all ranks;
    inputs are left as they were; the gradient that autograd computes through `forward` is
    `adjoint(y)`, and the one through that gradient is `forward(x)` again.

    Args:
        forward: the operator F, called with the own part of `x`.
        adjoint: its adjoint F*, called with the own part of `y`.
        x: own part of a tensor of the domain.
        y: own part of a tensor of the range, of the shape of `forward(x)`.
        comm: the ranks that take part; default the world.
        domain: kind of space of `x`.
        range: kind of space of `y`.
        rtol: largest difference relative to the norms; default by dtype.
        backward: whether autograd is checked.
        twice: whether its second derivative is checked.

    Returns:
        The difference of the two inner products relative to the norms, the same on all ranks.

    Raises:
        AssertionError: on all ranks alike, with the numbers.

    Example:
        >>> check_adjoint(lambda x: 2 * x, lambda y: 2 * y, torch.ones(3), torch.arange(3.0))
        0.0
    """
    __tracebackhide__ = True
    comm = Communicator.of(comm)
    expect_choice("domain", domain, get_args(Space), error=LayoutError)
    expect_choice("range", range, get_args(Space), error=LayoutError)
    title = f"{name_of(forward)} and {name_of(adjoint)} are not adjoint ({domain} -> {range})"
    derive = backward and (x.is_floating_point() or x.is_complex())
    point, toward = x.detach().clone(), y.detach().clone()
    fx = forward(point.requires_grad_(derive))
    fy = adjoint(toward)

    wrong_shapes = _shape_problems("forward(x)", fx, "y", y)
    wrong_shapes += _shape_problems("adjoint(y)", fy, "x", x)
    replicated = {"x": x, "adjoint(y)": fy} if domain == "R" else {}
    replicated |= {"y": y, "forward(x)": fx} if range == "R" else {}
    part = _Part(
        sides=() if wrong_shapes else (_side(fx, y), _side(x, fy)),
        largest=(_largest(fx), _largest(fy)),
        digests={name: _digest(value) for name, value in replicated.items()},
        problems=wrong_shapes,
    )
    if not (_same(point, x) and _same(toward, y)):
        part.problems.append("an input was changed in place")
    if derive and not fx.requires_grad:
        part.problems.append("forward(x) has no gradient although x asks for one")
    parts: list[_Part] = comm.all_gather_object(part)
    for part in parts:
        part.problems += [
            f'{name} is in a replicated space "R" but differs from that of rank 0'
            for name, digest in part.digests.items()
            if digest != parts[0].digests[name]
        ]
    raise_what_was_found(title, [part.problems for part in parts])

    limit = rtol if rtol is not None else max(_RTOL.get(t.dtype, 0.0) for t in (x, y))
    (first, scale), (right, other) = (
        _total([part.sides[i] for part in parts], space) for i, space in enumerate((range, domain))
    )
    if x.is_complex() != y.is_complex():  # linear over the reals only
        first, right = complex(first.real), complex(right.real)
    error = abs(first - right) / (max(scale, other) or 1.0)
    if not error <= limit:
        shown = (first.real, right.real) if first.imag == right.imag == 0 else (first, right)
        ratio = f", ratio {abs(first / right):.6g}" if right else ""
        difference = (
            f"<Fx, y>  = {shown[0]:.12g} (space {range})\n"
            f"<x, F*y> = {shown[1]:.12g} (space {domain})\n"
            f"relative difference {error:.3g} > {limit:.3g}{ratio}"
        )
        raise_what_was_found(title, [[difference]] * comm.size)
    if derive:
        allowed_fx, allowed_fy = (limit * max(part.largest[i] for part in parts) for i in (0, 1))
        seed = y.detach().clone().requires_grad_(twice)
        (gradient,) = torch.autograd.grad(fx, point, seed, create_graph=twice)
        name = "the gradient that autograd computes"
        problems = _difference(name, gradient, "adjoint(y)", fy, allowed_fy)
        if twice and not gradient.requires_grad:
            problems.append("the gradient cannot be differentiated again")
        raise_together(title, problems, comm=comm)
        if twice:
            (again,) = torch.autograd.grad(gradient, seed, point.detach().clone())
            name = "the gradient of the gradient"
            problems = _difference(name, again, "forward(x)", fx, allowed_fx)
            raise_together(title, problems, comm=comm)
    return error


Side = tuple[complex, float, float]
"""A rank's part of an inner product, and of the squared norms of both factors."""


@dataclass
class _Part:
    """What one rank tells the others."""

    sides: tuple[Side, ...]
    """Of <Fx, y> and <x, F*y>."""
    largest: tuple[float, float]
    """Largest values of Fx and F*y."""
    digests: dict[str, bytes]
    """What must be the same on all ranks."""
    problems: list[str]


def _total(sides: Sequence[Side], space: Space) -> tuple[complex, float]:
    """Return an inner product over all ranks, and the product of the norms."""
    counted = sides[:1] if space == "R" else sides
    squares = sum(side[1] for side in counted) * sum(side[2] for side in counted)
    return complex(sum(side[0] for side in counted)), squares**0.5


def _side(a: Tensor, b: Tensor) -> Side:
    return _inner(a, b), _inner(a, a).real, _inner(b, b).real


def _inner(a: Tensor, b: Tensor) -> complex:
    """Return the own part of `<a, b>`, linear in `a` and antilinear in `b`."""
    wide = torch.complex128
    return complex(torch.sum(a.detach().to(wide) * b.detach().to(wide).conj()).item())


def _largest(a: Tensor) -> float:
    return a.detach().abs().max().item() if a.numel() else 0.0


def _digest(a: Tensor) -> bytes:
    values = (a.detach().cpu() + 0).contiguous()  # -0.0 becomes 0.0
    described = f"{values.dtype} {tuple(values.shape)} ".encode()
    return hashlib.sha256(described + bytes_of(values).numpy().tobytes()).digest()


def _same(a: Tensor, b: Tensor) -> bool:
    a, b = a.detach(), b.detach()
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def _difference(
    name: str, actual: Tensor, other: str, expected: Tensor, allowed: float
) -> list[str]:
    if actual.shape != expected.shape:
        return _shape_problems(name, actual, other, expected)
    gap = _largest(actual.detach() - expected.detach())
    if gap <= allowed:
        return []
    return [f"{name} is not {other}: largest difference {gap:.6g}, allowed {allowed:.3g}"]


def _shape_problems(name: str, value: Tensor, other: str, like: Tensor) -> list[str]:
    if value.shape == like.shape:
        return []
    return [f"{name} has shape {list(value.shape)}, but {other} has {list(like.shape)}"]
