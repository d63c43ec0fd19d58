"""`all_gather` (S -> I) and `reduce_scatter` (I -> S): joined blocks, and sums cut in blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.comm import Communicator
from unisono.operators import traced
from unisono.operators.linear import LinearMap, identity
from unisono.operators.plans import BlockPlan, block_plan, whole_plan


class AllGather(LinearMap):
    """S -> I: every rank gets all blocks, each for its own use."""

    @staticmethod
    def kernel(x: Tensor, plan: BlockPlan) -> Tensor:
        """See `LinearMap`."""
        return join_blocks(x, plan) if plan.landed is None else plan.landed


class ReduceScatter(LinearMap):
    """I -> S: the ranks' tensors are summed and each rank keeps its block."""

    adjoint = AllGather

    @staticmethod
    def kernel(x: Tensor, plan: BlockPlan) -> Tensor:
        """See `LinearMap`."""
        if plan.landed is not None:
            return plan.landed
        if torch.compiler.is_compiling():
            return traced.reduce_scatter(x, plan.dim, plan.sizes, plan.comm)
        return plan.comm.reduce_scatter(x, plan.dim, plan.sizes)


AllGather.adjoint = ReduceScatter


def join_blocks(x: Tensor, plan: BlockPlan) -> Tensor:
    """Return the blocks of all ranks joined, without autograd."""
    if torch.compiler.is_compiling():
        return traced.all_gather(x, plan.dim, plan.sizes, plan.comm)
    return plan.comm.all_gather(x, plan.dim, plan.sizes)


def all_gather(
    x: Tensor, dim: int = 0, sizes: Sequence[int] | None = None, *, comm: Communicator
) -> Tensor:
    """Return the blocks of all ranks joined along `dim`; gradients are summed over ranks.

    Collective over `comm`. S -> I: each rank uses the result for its own share of the work. Blocks
    may differ along `dim` or be empty; without `sizes` one small exchange learns them.
    """
    plan = block_plan(x, dim, sizes, comm, "all_gather")
    return identity(x) if comm.size == 1 else AllGather.apply(x, plan)


def reduce_scatter(
    x: Tensor, dim: int = 0, sizes: Sequence[int] | None = None, *, comm: Communicator
) -> Tensor:
    """Return this rank's block along `dim` of the sum over ranks; gradients are gathered.

    Collective over `comm`. I -> S. `x` has the same shape everywhere; blocks are balanced, or as
    `sizes` says.
    """
    plan = whole_plan(x, dim, sizes, comm, "reduce_scatter")
    return identity(x) if comm.size == 1 else ReduceScatter.apply(x, plan)
