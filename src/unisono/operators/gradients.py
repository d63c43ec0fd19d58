"""How gradients of a parameter that several ranks hold become one gradient.

A `GradientPolicy` says over which ranks they are summed and over which they are averaged. It is
carried out at one of three times: inside backward, to any order (`summed_gradients`); after it
(`reduce_gradients`); in buckets while it goes on (the engine of `DataParallel`).
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from unisono.comm import Communicator
from unisono.comm.collectives import all_reduce_together
from unisono.operators.plans import GroupPlan
from unisono.operators.reduce import SumToReplicated
from unisono.torch_private import at_end_of_backward

BUCKET_MB = 25.0
"""Largest message in which gradients travel together through sockets, or between GPUs."""

FIRST_BYTES = 1 << 20
"""The first bucket is full at this size, so that the first message starts early in backward."""


@dataclass(frozen=True)
class GradientPolicy:
    """Which ranks hold terms of a gradient, and which hold whole gradients of other data."""

    sum_over: tuple[Communicator, ...] = ()
    """Ranks that hold terms: the gradient is their sum."""
    mean_over: tuple[Communicator, ...] = ()
    """Ranks that hold whole gradients: the gradient is their mean."""

    @property
    def comms(self) -> tuple[Communicator, ...]:
        """Groups of several ranks over which gradients are added up, one after the other."""
        return tuple(comm for comm in (*self.sum_over, *self.mean_over) if comm.size > 1)

    @property
    def divisor(self) -> int:
        """By what the sum over all these ranks is divided."""
        return math.prod(comm.size for comm in self.mean_over)

    @property
    def ranks(self) -> frozenset[int]:
        """All ranks that take part, by their numbers in the world."""
        return frozenset(r for comm in (*self.sum_over, *self.mean_over) for r in comm.ranks)


def plan_buckets(
    sizes: Sequence[tuple[int, object]], largest_bytes: float, first_bytes: float = FIRST_BYTES
) -> list[list[int]]:
    """Return which parameters share a bucket, as lists of indices.

    Parameters are taken from the last to the first, about the order in which backward reaches
    them. A parameter is never split; one that is larger than a bucket gets its own. The first
    bucket is closed by the parameter that fills it: a large one leaves with the small ones before
    it, instead of waiting for those behind it.

    Args:
        sizes: bytes of each parameter and what must not be mixed (its device and dtype).
        largest_bytes: a bucket is closed before it grows beyond this.
        first_bytes: the first bucket is closed when it has reached this.

    >>> plan_buckets([(4, "a"), (4, "a"), (4, "b"), (5, "a"), (1, "a")], 8, 2)
    [[4, 3], [2], [1, 0]]
    """
    buckets: list[list[int]] = []
    open_buckets: dict[object, tuple[list[int], float]] = {}
    for index in range(len(sizes) - 1, -1, -1):
        nbytes, kind = sizes[index]
        members, filled = open_buckets.get(kind, ([], 0.0))
        is_full = bool(members) and members is buckets[0] and filled >= first_bytes
        if not members or is_full or filled + nbytes > largest_bytes:
            members, filled = [], 0.0
            buckets.append(members)
        members.append(index)
        open_buckets[kind] = members, filled + nbytes
    return buckets


# -- inside backward ------------------------------------------------------------------------------


class _SumGradients(torch.autograd.Function):
    """The identity on parameters that several ranks hold; their gradients are summed together."""

    @staticmethod
    def forward(ctx: Any, plan: GroupPlan, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        return tuple(map(Tensor.view_as, parameters, parameters))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        present = [g for g in grads if g is not None]
        if not present:
            return None, *grads
        flat = torch.cat([g.reshape(-1) for g in present])
        total = SumToReplicated.apply_in_backward(flat, ctx.plan)
        parts = iter(total.split([g.numel() for g in present]))
        return None, *[None if g is None else next(parts).view(g.shape) for g in grads]


def summed_gradients(comm: Communicator, *parameters: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors, which all ranks of `comm` hold equal; their gradients are summed.

    One message in the backward for all of them; derivatives of any order.
    """
    if comm.size > 1 and any(x.requires_grad for x in parameters):
        return _SumGradients.apply(GroupPlan(comm), *parameters)
    return parameters


# -- after backward -------------------------------------------------------------------------------


@torch.no_grad()
def reduce_gradients(
    parameters: Iterable[tuple[Tensor, GradientPolicy]], bucket_mb: float = BUCKET_MB
) -> None:
    """Carry out the policy of each parameter on its `.grad`. Collective over the ranks of each.

    A rank without a gradient counts as zero; a parameter without one anywhere keeps None.

    Args:
        parameters: in the same order on all ranks that share them.
        bucket_mb: gradients travel joined in messages of this size.
    """
    together: dict[tuple[Communicator, ...], list[tuple[Tensor, int]]] = {}
    for p, policy in parameters:
        if p.requires_grad and policy.comms:
            together.setdefault(policy.comms, []).append((p, policy.divisor))
    for comms, members in together.items():
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p, _ in members]
        has_grad = [p.grad is not None for p, _ in members]
        holders = torch.ones(len(members), device=comms[0].device)
        if not all(has_grad):
            holders.copy_(torch.tensor(has_grad))
        for comm in comms:
            all_reduce_together(comm, [*grads, holders], "sum", bucket_mb)
        # The host waits for the sums only where this rank lacks a gradient.
        counts = has_grad if all(has_grad) else holders.tolist()
        for (p, divisor), grad, count in zip(members, grads, counts, strict=True):
            if count:
                p.grad = grad.div_(divisor)


class EarlierGradients:
    """Gradients that are complete, set aside while the terms of further ones are collected."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._grads = [(p, p.grad) for p in parameters]
        for p, _ in self._grads:
            p.grad = None

    @torch.no_grad()
    def add(self) -> None:
        """Add them to what has come since."""
        for p, grad in self._grads:
            if grad is not None:
                p.grad = grad if p.grad is None else grad.add_(p.grad)

    def put_back(self) -> None:
        """Replace what has come since by them."""
        for p, grad in self._grads:
            p.grad = grad


class BackwardWatch:
    """Whether a backward goes on. One that raises does not say so; it is noticed later."""

    is_open = False
    """Whether a backward has begun and was not closed."""
    _end: weakref.ref[Callable[[], None]] | None = None

    @property
    def is_running(self) -> bool:
        """Whether autograd is still at it; an open one that is not has raised."""
        return self.is_open and self._end is not None and self._end() is not None

    def begin(self, at_end: Callable[[], None]) -> None:
        """Note that a backward has begun; `at_end` is called when all gradients are there."""
        end: Callable[[], None] = partial(
            at_end
        )  # an object that autograd alone holds, as long as backward goes on
        self.is_open, self._end = True, weakref.ref(end)
        at_end_of_backward(end)

    def close(self) -> None:
        """Note that the backward is over."""
        self.is_open = False


_OPAQUE = (nn.Module, type, ModuleType, FunctionType)
"""What holds no results of a forward."""


def tensors_in(values: Any, objects: int = 0) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples, mappings and dataclasses.

    Args:
        values: inputs or outputs of a module, or a batch.
        objects: how many other objects, one inside the other, are looked into.

    >>> [x.item() for x in tensors_in({"a": [torch.tensor(1), 2], "b": torch.tensor(3)})]
    [1, 3]
    """
    yield from _walked(values, objects, set())


def _walked(values: Any, objects: int, visited: set[int]) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
        return
    parts: Iterable[Any] = ()
    if isinstance(values, Mapping):
        parts = values.values()
    elif isinstance(values, list | tuple):
        parts = values
    elif dataclasses.is_dataclass(values) and not isinstance(values, type):
        parts = [getattr(values, field.name) for field in dataclasses.fields(values)]
    elif (
        objects > 0
        and hasattr(values, "__dict__")
        and not isinstance(values, _OPAQUE)
        and id(values) not in visited
    ):
        visited.add(id(values))
        objects -= 1
        parts = list(vars(values).values())
    for value in parts:
        yield from _walked(value, objects, visited)
