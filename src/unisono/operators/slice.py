"""`slice_replicated` (R -> S) and `concat_replicated` (S -> R): cut and join what counts once.

Unlike `all_gather`, the joined tensor is used alike on every rank, so its gradient is equal there
and each rank takes its own block of it, without a message.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from unisono.comm import Communicator
from unisono.operators import traced
from unisono.operators.all_gather import join_blocks
from unisono.operators.linear import LinearMap, identity
from unisono.operators.plans import BlockPlan, block_plan, whole_plan


class SliceReplicated(LinearMap):
    """R -> S: each rank keeps its block of a replicated tensor."""

    @staticmethod
    def kernel(x: Tensor, plan: BlockPlan) -> Tensor:
        """See `LinearMap`."""
        return traced.take_block(x, plan.dim, plan.sizes, plan.comm.rank)


class ConcatReplicated(LinearMap):
    """S -> R: the blocks of all ranks become one replicated tensor."""

    adjoint = SliceReplicated

    @staticmethod
    def kernel(x: Tensor, plan: BlockPlan) -> Tensor:
        """See `LinearMap`."""
        return join_blocks(x, plan)


SliceReplicated.adjoint = ConcatReplicated


def slice_replicated(
    x: Tensor, dim: int = 0, sizes: Sequence[int] | None = None, *, comm: Communicator
) -> Tensor:
    """Return this rank's block along `dim` of `x`, which all ranks hold equal.

    Local forward; the backward gathers the blocks' gradients (collective). Blocks are balanced, or
    as `sizes` says.
    """
    plan = whole_plan(x, dim, sizes, comm, "slice_replicated")
    return identity(x) if comm.size == 1 else SliceReplicated.apply(x, plan)


def concat_replicated(
    x: Tensor, dim: int = 0, sizes: Sequence[int] | None = None, *, comm: Communicator
) -> Tensor:
    """Return the blocks of all ranks joined along `dim`, a value all ranks then use alike.

    Collective forward; the backward takes the own block and sends nothing. Where each rank uses the
    result differently, `all_gather` is the right one: a slice would lose the others' gradients.
    """
    plan = block_plan(x, dim, sizes, comm, "concat_replicated")
    return identity(x) if comm.size == 1 else ConcatReplicated.apply(x, plan)
