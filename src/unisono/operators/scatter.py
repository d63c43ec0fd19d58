"""`scatter` and `gather`: the blocks of one rank's tensor to all ranks, and back."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from unisono.comm import Communicator
from unisono.comm.arguments import check_rank
from unisono.errors import UnisonoError
from unisono.operators.agreement import anchor, announce
from unisono.operators.linear import LinearMap, identity
from unisono.operators.plans import BlockPlan, block_plan, check_comm, whole_plan


class Scatter(LinearMap):
    """Each rank gets its block of the root's tensor; the others' input has no elements."""

    @staticmethod
    def kernel(x: Tensor, plan: BlockPlan) -> Tensor:
        """See `LinearMap`."""
        comm, root = plan.comm, plan.root or 0
        whole = x if comm.rank == root else None
        like = (plan.shape, plan.dtype)
        return comm.scatter(whole, root, plan.dim, plan.sizes, like=like)


class Gather(LinearMap):
    """The root gets all blocks joined; the others' output has no elements."""

    adjoint = Scatter

    @staticmethod
    def kernel(x: Tensor, plan: BlockPlan) -> Tensor:
        """See `LinearMap`."""
        joined = plan.comm.gather(x, plan.root or 0, plan.dim, plan.sizes)
        return x.new_empty(0) if joined is None else joined


Scatter.adjoint = Gather


def scatter(
    x: Tensor | None,
    src: int = 0,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    *,
    comm: Communicator,
) -> Tensor:
    """Return this rank's block along `dim` of the tensor of rank `src`; gradients go back.

    Collective over `comm`, and so is the backward: every rank must use its block. Only `src` needs
    a tensor, `dim` and `sizes` (balanced when None).
    """
    check_comm(comm, "scatter")
    check_rank(src, comm.size, "src", "scatter")
    refused: UnisonoError | None = None
    plan: BlockPlan | None = None
    if comm.rank == src and x is not None:
        try:
            plan = whole_plan(x, dim, sizes, comm, "scatter")
        except UnisonoError as error:
            refused = error
    if comm.size == 1 and plan is not None and x is not None:
        return identity(x)
    numbers = [0] * (comm.size + 1) if plan is None else [plan.dim, *plan.sizes]
    shape, dtype, needs_grad, told = announce(x, src, numbers, comm, "scatter", refused)
    dim, blocks = told[0], told[1:]
    block = (*shape[:dim], blocks[comm.rank], *shape[dim + 1 :])
    whole = x if comm.rank == src and x is not None else anchor(dtype, needs_grad, comm, x)
    return Scatter.apply(whole, BlockPlan(comm, dim, blocks, src, block, dtype))


def gather(
    x: Tensor,
    dst: int = 0,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    *,
    comm: Communicator,
) -> Tensor:
    """Return all blocks joined along `dim` on rank `dst`, a tensor without elements elsewhere.

    Collective over `comm`; the backward scatters the root's gradient, so every rank must use its
    result (the empty one too: `attach` does that).
    """
    check_comm(comm, "gather")
    check_rank(dst, comm.size, "dst", "gather")
    plan = block_plan(x, dim, sizes, comm, "gather")
    if comm.size == 1:
        return identity(x)
    rooted = BlockPlan(comm, plan.dim, plan.sizes, dst, tuple(x.shape), x.dtype)
    return Gather.apply(x, rooted)
