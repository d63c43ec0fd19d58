"""`broadcast` and `sum_reduce`: between one rank and all."""

from __future__ import annotations

import torch
from torch import Tensor

from unisono.comm import Communicator
from unisono.comm.arguments import check_rank, check_tensor
from unisono.comm.collectives import Like
from unisono.operators.agreement import anchor, announce, like_of
from unisono.operators.linear import LinearMap, identity
from unisono.operators.plans import RootPlan, check_comm


class Broadcast(LinearMap):
    """The root's tensor on every rank; the others' input has no elements."""

    @staticmethod
    def kernel(x: Tensor, plan: RootPlan) -> Tensor:
        """See `LinearMap`."""
        comm = plan.comm
        sent = x if comm.rank == plan.root else None
        return comm.broadcast(sent, plan.root, like=(plan.shape, plan.dtype))


class SumReduce(LinearMap):
    """The sum over ranks on the root; the others' output has no elements."""

    adjoint = Broadcast

    @staticmethod
    def kernel(x: Tensor, plan: RootPlan) -> Tensor:
        """See `LinearMap`."""
        total = plan.comm.reduce(x, plan.root)
        return x.new_empty(0) if total is None else total


Broadcast.adjoint = SumReduce


def broadcast(
    x: Tensor | None, src: int = 0, *, like: Like | None = None, comm: Communicator
) -> Tensor:
    """Return the tensor of rank `src` on every rank; the gradients are summed on `src`.

    Collective over `comm`, and so is the backward: every rank must use its result (or `attach` it).

    Args:
        x: the tensor on `src`. Elsewhere None, or anything: only a tensor without elements counts,
            as the (empty) input that the result's graph hangs on.
        src: rank of `comm` that holds it.
        like: shape and dtype (or a tensor like it). Given on every rank, nothing has to be
            announced beforehand, and every rank's result takes part in autograd.
        comm: the ranks.
    """
    check_comm(comm, "broadcast")
    check_rank(src, comm.size, "src", "broadcast")
    if comm.size == 1:
        return identity(check_tensor(x, comm.device, "broadcast"))
    if comm.rank == src and like is not None:
        check_tensor(x, comm.device, "broadcast")
    if like is None:
        shape, dtype, needs_grad, _ = announce(x, src, (), comm, "broadcast")
    else:
        (shape, dtype), needs_grad = like_of(like), torch.is_grad_enabled()
    plan = RootPlan(comm, src, shape, dtype)
    mine = x if comm.rank == src and x is not None else anchor(dtype, needs_grad, comm, x)
    return Broadcast.apply(mine, plan)


def sum_reduce(x: Tensor, dst: int = 0, *, comm: Communicator) -> Tensor:
    """Return the sum of `x` over ranks on rank `dst`, a tensor without elements elsewhere.

    Collective over `comm`; the backward sends the root's gradient to all, so every rank must use
    its result (the empty one too: `attach` does that).
    """
    check_comm(comm, "sum_reduce")
    check_tensor(x, comm.device, "sum_reduce")
    check_rank(dst, comm.size, "dst", "sum_reduce")
    if comm.size == 1:
        return identity(x)
    return SumReduce.apply(x, RootPlan(comm, dst, tuple(x.shape), x.dtype))
