"""`copy` (R -> I) and `sum_to_replicated` (I -> R): into and out of work that ranks share.

R is a value that every rank holds equal and that counts once; I is each rank's own tensor. The
first is the identity whose gradient is summed, the second the sum whose gradient is the identity.
"""

from __future__ import annotations

from torch import Tensor

from unisono.comm import Communicator
from unisono.comm.arguments import check_tensor
from unisono.operators.all_reduce import sum_over_ranks
from unisono.operators.linear import LinearMap, identity
from unisono.operators.plans import GroupPlan, check_comm


class Copy(LinearMap):
    """R -> I: each rank goes on with its own copy of a replicated value."""

    @staticmethod
    def kernel(x: Tensor, plan: GroupPlan) -> Tensor:
        """See `LinearMap`."""
        return identity(x)


class SumToReplicated(LinearMap):
    """I -> R: the ranks' terms become one replicated sum."""

    adjoint = Copy

    @staticmethod
    def kernel(x: Tensor, plan: GroupPlan) -> Tensor:
        """See `LinearMap`."""
        return sum_over_ranks(x, plan)


Copy.adjoint = SumToReplicated


def copy(x: Tensor, *, comm: Communicator) -> Tensor:
    """Return `x`; its gradient is the sum over ranks. Its backward is collective.

    For a value that all ranks hold equal (R) and each then uses for its own share of the work (I),
    such as a weight kept on every rank.
    """
    check_comm(comm, "copy")
    check_tensor(x, comm.device, "copy")
    return identity(x) if comm.size == 1 else Copy.apply(x, GroupPlan(comm))


def sum_to_replicated(x: Tensor, *, comm: Communicator) -> Tensor:
    """Return the sum of `x` over ranks; its gradient passes unchanged. Collective.

    For terms that each rank computed (I) and a result that every rank then uses alike (R), such as
    a loss: each rank calls `backward()` once, and no gradient is counted twice.
    """
    check_comm(comm, "sum_to_replicated")
    check_tensor(x, comm.device, "sum_to_replicated")
    return identity(x) if comm.size == 1 else SumToReplicated.apply(x, GroupPlan(comm))
