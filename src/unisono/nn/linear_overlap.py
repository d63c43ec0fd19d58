"""Column- and row-parallel products as one autograd function each, with messages under way.

In the backward of the columns the gradients of other ranks' inputs travel while that of the weight
is computed; in that of the rows the own block is multiplied while the others' arrive. In shared
memory, where the copying is ours, everything is done in turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from unisono.comm.perform import Pending
from unisono.operators import AllGather, ReduceScatter
from unisono.operators.gather import BlockPlan


class Gathering:
    """The blocks of an input on their way to all ranks.

    Args:
        x: own block.
        plan: sizes of all blocks.
    """

    def __init__(self, x: Tensor, plan: BlockPlan) -> None:
        self._own, self._plan = x, plan
        self._pending = _gather(x, plan) if travels_by_itself(plan) else None

    def take(self) -> Tensor:
        """Return the blocks of all ranks joined. Collective."""
        if self._pending is None:
            return self._plan.comm.all_gather(self._own, self._plan.dim, self._plan.sizes)
        return self._pending.wait()

    def drop(self) -> None:
        """Let what is under way arrive, and forget it."""
        if self._pending is not None:
            self._pending.wait()


class Product:
    """What this rank adds to the sums of a row-parallel layer, computed while ranks agree."""

    def __init__(self, partial: Tensor | None) -> None:
        self.partial = partial

    def drop(self) -> None:
        """Forget it."""


def travels_by_itself(plan: BlockPlan) -> bool:
    """Whether messages move while this rank computes, without a thread of ours."""
    return plan.comm.backend != "shm"


class Columns(torch.autograd.Function):
    """Own block of the input, weight, bias -> own output features; the blocks have been joined."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: BlockPlan, joined: Tensor
    ) -> Tensor:
        """Multiply."""
        ctx.plan = plan
        ctx.save_for_backward(x, weight, bias, joined)
        return F.linear(joined, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of own block, weight and bias."""
        x, weight, bias, joined = ctx.saved_tensors
        plan: BlockPlan = ctx.plan
        (dy,) = grads
        if torch.is_grad_enabled():

            def again() -> Tensor:
                return F.linear(AllGather.apply(x, replace(plan, landed=joined)), weight, bias)

            return *_composed(again, (x, weight, bias), dy), None, None
        needs_x, needs_w, needs_b = ctx.needs_input_grad[:3]
        pending: Pending[Tensor] | None = None
        dx: Tensor | None = None
        if needs_x:
            summands = dy @ weight
            if travels_by_itself(plan):
                pending = plan.comm.start.reduce_scatter(summands, plan.dim, plan.sizes)
            else:
                dx = plan.comm.reduce_scatter(summands, plan.dim, plan.sizes)
        dw = _outer(dy, joined, needs_w)
        db = _matrix(dy).sum(0) if needs_b else None
        return dx if pending is None else pending.wait(), dw, db, None, None


class Rows(torch.autograd.Function):
    """Own input features, weight -> own block of the sum over ranks, from own summands."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, plan: BlockPlan, partial: Tensor) -> Tensor:
        """Sum."""
        y = plan.comm.reduce_scatter(partial, plan.dim, plan.sizes)
        ctx.plan = plan
        ctx.save_for_backward(x, weight)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of own input features and weight."""
        x, weight = ctx.saved_tensors
        plan: BlockPlan = ctx.plan
        (dy,) = grads
        if torch.is_grad_enabled():
            nothing = torch.zeros_like(dy)  # of the sum itself only the gradient is wanted

            def again() -> Tensor:
                summands = F.linear(x, weight)
                return ReduceScatter.apply(summands, replace(plan, landed=nothing))

            return *_composed(again, (x, weight), dy), None, None
        needs_x, needs_w = ctx.needs_input_grad[:2]
        if not (needs_x or needs_w):
            return None, None, None, None
        if not travels_by_itself(plan) or plan.dim != dy.dim() - 1:
            whole = plan.comm.all_gather(dy, plan.dim, plan.sizes)
            return _product(whole, weight, needs_x), _outer(whole, x, needs_w), None, None
        return *_by_blocks(dy, x, weight, plan, needs_x, needs_w), None, None


def _by_blocks(
    dy: Tensor, x: Tensor, weight: Tensor, plan: BlockPlan, needs_x: bool, needs_w: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Multiply the own output features while those of other ranks travel, then the others."""
    pending = _gather(dy, plan)
    ends = list(accumulate(plan.sizes))
    stop = ends[plan.comm.rank]
    start = stop - plan.sizes[plan.comm.rank]
    dx = _product(dy, weight[start:stop], needs_x)
    dw = torch.empty_like(weight) if needs_w else None
    if dw is not None:
        torch.mm(_matrix(dy).T, _matrix(x), out=dw[start:stop])
    whole = pending.wait()
    for a, b in ((0, start), (stop, ends[-1])):
        if a == b:
            continue
        part = _matrix(whole[..., a:b])
        if dx is not None:
            _matrix(dx).addmm_(part, weight[a:b])
        if dw is not None:
            torch.mm(part.T, _matrix(x), out=dw[a:b])
    return dx, dw


def _gather(x: Tensor, plan: BlockPlan) -> Pending[Tensor]:
    return plan.comm.start.all_gather(x, plan.dim, plan.sizes)


def _product(dy: Tensor, weight: Tensor, needed: bool) -> Tensor | None:
    return dy @ weight if needed else None


def _outer(dy: Tensor, x: Tensor, needed: bool) -> Tensor | None:
    return _matrix(dy).T @ _matrix(x) if needed else None


def _matrix(x: Tensor) -> Tensor:
    """Return all dims but the last as one."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _composed(
    again: Callable[[], Tensor], inputs: Sequence[Tensor | None], dy: Tensor
) -> list[Tensor | None]:
    """Return the gradients as functions that can be differentiated again."""
    held = [t for t in inputs if t is not None and t.requires_grad]
    with torch.enable_grad():
        y = again()
    found = iter(torch.autograd.grad(y, held, dy, create_graph=True))
    return [next(found) if t is not None and t.requires_grad else None for t in inputs]
