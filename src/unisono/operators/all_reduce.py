"""`all_sum_reduce`: the sum over ranks, on all of them (I -> I). It is its own adjoint."""

from __future__ import annotations

import torch
from torch import Tensor

from unisono.comm import Communicator
from unisono.comm.arguments import check_tensor
from unisono.errors import UnisonoError
from unisono.operators import traced
from unisono.operators.linear import LinearMap, identity
from unisono.operators.plans import GroupPlan, check_comm


class AllSumReduce(LinearMap):
    """Every rank's tensor becomes the sum of all; the gradients are summed the same way."""

    @staticmethod
    def kernel(x: Tensor, plan: GroupPlan) -> Tensor:
        """See `LinearMap`."""
        return sum_over_ranks(x, plan)


AllSumReduce.adjoint = AllSumReduce


def sum_over_ranks(x: Tensor, plan: GroupPlan) -> Tensor:
    """Return the sum over ranks, without autograd."""
    if plan.landed is not None:
        return identity(plan.landed)
    sent = x if plan.wire is None else x.to(plan.wire)
    if torch.compiler.is_compiling():
        total = traced.all_reduce(sent, plan.comm)
    else:
        total = plan.comm.all_reduce(sent)
    return total if plan.wire is None else total.to(x.dtype)


def all_sum_reduce(
    x: Tensor, *, wire: str | torch.dtype | None = None, comm: Communicator
) -> Tensor:
    """Return the sum of `x` over all ranks, on every rank. Collective; any order of derivative.

    A plain linear map on the direct sum of the ranks' tensors (I -> I): gradients are summed over
    ranks too. For a value that every rank uses alike (a loss) use `sum_to_replicated`.

    Args:
        x: tensor of the same shape on every rank.
        wire: dtype in which it travels, e.g. `"bfloat16"` to halve the bytes; the sum is rounded
            once.
        comm: the ranks.
    """
    check_comm(comm, "all_sum_reduce")
    check_tensor(x, comm.device, "all_sum_reduce")
    if comm.size == 1:
        return identity(x)
    return AllSumReduce.apply(x, GroupPlan(comm, _wire_dtype(wire, x.dtype)))


def _wire_dtype(wire: str | torch.dtype | None, own: torch.dtype) -> torch.dtype | None:
    if wire is None:
        return None
    dtype = getattr(torch, wire, None) if isinstance(wire, str) else wire
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        raise UnisonoError.because(
            f"all_sum_reduce(wire={wire!r})",
            f"a tensor of {own}",
            None,
            'wire="bfloat16", "float16" or "float32"',
        )
    return None if dtype == own else dtype
