"""The dot-product test of a linear operator on distributed tensors: `<Fx, y> = <x, F*y>`.

The inner product depends on the kind of space: a replicated tensor ("R") counts once, blocks ("S")
and independent tensors ("I") are summed over ranks. A wrong sum or a missing one shows as a factor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from unisono.comm import Communicator
from unisono.errors import LayoutError
from unisono.testing.agreement import raise_together

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
    _check_spaces(domain, range)
    title = f"{_name(forward)} and {_name(adjoint)} are not adjoint ({domain} -> {range})"
    kept = x.detach().clone(), y.detach().clone()
    fx = forward(x.detach())
    problems = _shape_problems("forward(x)", fx, "y", y)
    raise_together(title, problems, comm=comm)
    fy = adjoint(y.detach())
    problems += _shape_problems("adjoint(y)", fy, "x", x)
    if not (_same(x, kept[0]) and _same(y, kept[1])):
        problems.append("an input was changed in place")
    raise_together(title, problems, comm=comm)

    problems += _replica_problems({"x": x, "adjoint(y)": fy}, domain, comm)
    problems += _replica_problems({"y": y, "forward(x)": fx}, range, comm)
    raise_together(title, problems, comm=comm)

    limit = _limit(rtol, x, y)
    left, right = _inner(fx, y, range, comm), _inner(x, fy, domain, comm)
    if x.is_complex() != y.is_complex():  # linear over the reals only
        left, right = complex(left.real), complex(right.real)
    scale = max(
        _norm(fx, range, comm) * _norm(y, range, comm),
        _norm(x, domain, comm) * _norm(fy, domain, comm),
    )
    error = abs(left - right) / scale if scale > 0 else 0.0
    if not error <= limit:
        problems.append(_numbers(left, right, error, limit, domain, range))
    raise_together(title, problems, comm=comm)
    if backward and (x.is_floating_point() or x.is_complex()):
        _check_autograd(forward, x, y, fx, fy, limit, title, comm, twice)
    return error


def _check_autograd(
    forward: Callable[[Tensor], Tensor],
    x: Tensor,
    y: Tensor,
    fx: Tensor,
    fy: Tensor,
    limit: float,
    title: str,
    comm: Communicator,
    twice: bool,
) -> None:
    __tracebackhide__ = True
    point = x.detach().clone().requires_grad_()
    toward = y.detach().clone().requires_grad_(twice)
    value = forward(point)
    lost = [] if value.requires_grad else ["forward(x) has no gradient although x asks for one"]
    raise_together(title, lost, comm=comm)
    (gradient,) = torch.autograd.grad(value, point, toward, create_graph=twice)
    problems = _difference(
        "the gradient that autograd computes", gradient, "adjoint(y)", fy, limit, comm
    )
    raise_together(title, problems, comm=comm)
    if twice:
        lost = [] if gradient.requires_grad else ["the gradient cannot be differentiated again"]
        raise_together(title, lost, comm=comm)
        (again,) = torch.autograd.grad(gradient, toward, x.detach().clone())
        problems = _difference("the gradient of the gradient", again, "forward(x)", fx, limit, comm)
        raise_together(title, problems, comm=comm)


def _inner(a: Tensor, b: Tensor, space: Space, comm: Communicator) -> complex:
    """Return `<a, b>`, linear in `a` and antilinear in `b`."""
    wide = torch.complex128
    own = torch.sum(a.detach().to(wide) * b.detach().to(wide).conj()).item()
    everybody: list[complex] = comm.all_gather_object(complex(own))
    return everybody[0] if space == "R" else sum(everybody)


def _norm(a: Tensor, space: Space, comm: Communicator) -> float:
    return abs(_inner(a, a, space, comm)) ** 0.5


def _limit(rtol: float | None, *tensors: Tensor) -> float:
    return rtol if rtol is not None else max(_RTOL.get(t.dtype, 0.0) for t in tensors)


def _check_spaces(*spaces: str) -> None:
    for space in spaces:
        if space not in ("R", "S", "I"):
            raise LayoutError.because(
                f"check_adjoint with a space {space!r}",
                "spaces are 'R' (replicated), 'S' (sharded), 'I' (independent)",
                hint='check_adjoint(..., domain="S", range="R")',
            )


def _shape_problems(name: str, value: Tensor, other: str, like: Tensor) -> list[str]:
    if value.shape == like.shape:
        return []
    return [f"{name} has shape {list(value.shape)}, but {other} has {list(like.shape)}"]


def _replica_problems(values: dict[str, Tensor], space: Space, comm: Communicator) -> list[str]:
    """Compare replicated tensors with those of rank 0. Collective if the space is R."""
    if space != "R":
        return []
    mine = {name: value.detach().cpu() for name, value in values.items()}
    first: dict[str, Tensor] = comm.broadcast_object(mine, 0)
    return [
        f'{name} is in a replicated space "R" but differs from that of rank 0'
        for name, value in mine.items()
        if not _same(value, first[name])
    ]


def _same(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def _difference(
    name: str, found: Tensor, other: str, expected: Tensor, limit: float, comm: Communicator
) -> list[str]:
    """Compare two tensors, relative to the largest value on any rank. Collective."""
    scale = max(comm.all_gather_object(_largest(expected)))
    if found.shape != expected.shape:
        return _shape_problems(name, found, other, expected)
    gap = _largest(found.detach() - expected.detach())
    if gap <= limit * scale:
        return []
    return [f"{name} is not {other}: largest difference {gap:.6g}, largest value {scale:.6g}"]


def _largest(a: Tensor) -> float:
    return a.detach().abs().max().item() if a.numel() else 0.0


def _numbers(
    left: complex, right: complex, error: float, limit: float, domain: Space, range_: Space
) -> str:
    real = left.imag == 0 and right.imag == 0
    a, b = (left.real, right.real) if real else (left, right)
    ratio = f", ratio {abs(left / right):.6g}" if right else ""
    return (
        f"<Fx, y>  = {a:.12g} (space {range_})\n"
        f"<x, F*y> = {b:.12g} (space {domain})\n"
        f"relative difference {error:.3g} > {limit:.3g}{ratio}"
    )


def _name(function: Callable[..., object]) -> str:
    return getattr(function, "__name__", type(function).__name__)
