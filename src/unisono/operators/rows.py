"""`all_gather_rows` and `add_rows`: fetch listed rows of other ranks, return and add them.

The movement of a graph's halo: only the rows that are needed travel, by an `all_to_all`.
"""

from __future__ import annotations

from torch import Tensor

from unisono.comm import Communicator, world
from unisono.errors import PartitionError
from unisono.operators.move import AllToAll, AllToAllPlan
from unisono.operators.plans import check_call
from unisono.topology import RowPlan


def all_gather_rows(x: Tensor, plan: RowPlan, *, comm: Communicator | None = None) -> Tensor:
    """Return the rows of other ranks that `plan` lists for this one, in rank order.

    Collective over `comm` (default: the world). `x` holds the own rows `[num_rows, ...]`; the
    gradients of the fetched rows go back and are added at their owner.
    """
    comm = world() if comm is None else comm
    _check_rows(x, plan, plan.num_rows, comm, "all_gather_rows")
    sizes = AllToAllPlan(comm, plan.send_sizes, plan.recv_sizes)
    return AllToAll.apply(x.index_select(0, plan.send_index), sizes)


def add_rows(x: Tensor, plan: RowPlan, *, comm: Communicator | None = None) -> Tensor:
    """Return `[num_rows, ...]`: for each own row the sum of what other ranks hold for it.

    Collective over `comm` (default: the world). `x` holds one row for each fetched row, as
    `all_gather_rows` returns them.
    """
    comm = world() if comm is None else comm
    _check_rows(x, plan, sum(plan.recv_sizes), comm, "add_rows")
    returned = AllToAll.apply(x, AllToAllPlan(comm, plan.recv_sizes, plan.send_sizes))
    total = returned.new_zeros((plan.num_rows, *returned.shape[1:]))
    return total.index_add(0, plan.send_index, returned)


def _check_rows(x: Tensor, plan: RowPlan, rows: int, comm: Communicator, verb: str) -> None:
    check_call(x, comm, verb)
    if x.dim() == 0 or x.shape[0] != rows:
        raise PartitionError.because(
            f"{verb} of shape {list(x.shape)}",
            f"a plan of {rows} rows on rank {comm.rank}",
            f"{x.shape[0] if x.dim() else 0} != {rows}",
        )
    if len(plan.send_sizes) != comm.size:
        raise PartitionError.because(
            f"{verb} on {comm.size} ranks",
            f"a plan for {len(plan.send_sizes)} ranks",
            f"{len(plan.send_sizes)} != {comm.size}",
        )
