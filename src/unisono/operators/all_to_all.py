"""`all_to_all`: rows between all ranks. Its adjoint is itself with the sizes swapped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.comm import Communicator
from unisono.comm.arguments import check_sizes, check_tensor
from unisono.errors import PartitionError
from unisono.operators import traced
from unisono.operators.linear import LinearMap, identity
from unisono.operators.plans import check_comm


@dataclass(frozen=True)
class AllToAllPlan:
    """How many rows go to and come from each rank."""

    comm: Communicator
    send_sizes: tuple[int, ...]
    recv_sizes: tuple[int, ...]

    @property
    def adjoint(self) -> AllToAllPlan:
        """The plan of the way back."""
        return AllToAllPlan(self.comm, self.recv_sizes, self.send_sizes)


class AllToAll(LinearMap):
    """Rows to every rank, in rank order."""

    @staticmethod
    def kernel(x: Tensor, plan: AllToAllPlan) -> Tensor:
        """See `LinearMap`."""
        if torch.compiler.is_compiling():
            return traced.all_to_all(x, plan.send_sizes, plan.recv_sizes, plan.comm)
        return plan.comm.all_to_all(x, plan.send_sizes, plan.recv_sizes)


AllToAll.adjoint = AllToAll


def all_to_all(
    x: Tensor,
    send_sizes: Sequence[int],
    recv_sizes: Sequence[int] | None = None,
    *,
    comm: Communicator,
) -> Tensor:
    """Send `send_sizes[q]` rows (dim 0, in rank order) to each rank q; return the rows received.

    Collective over `comm`. Without `recv_sizes` one small exchange learns them.
    """
    check_comm(comm, "all_to_all")
    check_tensor(x, comm.device, "all_to_all")
    if x.dim() == 0:
        raise PartitionError.because(
            "all_to_all of a tensor without dims", "no rows to send", None, "x.reshape(1)"
        )
    sent = check_sizes(send_sizes, comm.size, "all_to_all", total=x.shape[0], what="send_sizes")
    if recv_sizes is None:
        matrix = comm.all_gather_ints(sent)
        received = tuple(row[comm.rank] for row in matrix)
    else:
        received = check_sizes(recv_sizes, comm.size, "all_to_all", what="recv_sizes")
    if comm.size == 1:
        return identity(x)
    return AllToAll.apply(x, AllToAllPlan(comm, sent, received))
