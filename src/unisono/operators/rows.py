"""`all_gather_rows` and `add_rows`: fetch listed rows of other ranks, return and add them.

The movement of a graph's halo: only the rows that are needed travel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.comm import Communicator, world
from unisono.comm.health import check as checking
from unisono.errors import PartitionError
from unisono.operators import traced
from unisono.operators.linear import LinearMap
from unisono.operators.plans import check_call
from unisono.topology import RowPlan


@dataclass(frozen=True, eq=False)
class RowsOnGroup:
    """A row plan and the ranks it is carried out on."""

    comm: Communicator
    rows: RowPlan


class AllGatherRows(LinearMap):
    """Own rows -> the rows of other ranks that this one needs."""

    @staticmethod
    def kernel(x: Tensor, plan: RowsOnGroup) -> Tensor:
        """Return the fetched rows."""
        rows = plan.rows
        return _move(rows_of(x, rows), rows.send_sizes, rows.recv_sizes, plan.comm)


class AddRows(LinearMap):
    """Rows for other ranks -> the sum of what came back for each own row."""

    adjoint = AllGatherRows

    @staticmethod
    def kernel(x: Tensor, plan: RowsOnGroup) -> Tensor:
        """Return the sums."""
        rows = plan.rows
        returned = _move(x, rows.recv_sizes, rows.send_sizes, plan.comm)
        total = returned.new_zeros((rows.num_rows, *returned.shape[1:]))
        return total.index_add(0, rows.send_index, returned)


AllGatherRows.adjoint = AddRows


def all_gather_rows(x: Tensor, plan: RowPlan, *, comm: Communicator | None = None) -> Tensor:
    """Return the rows of other ranks that `plan` lists for this one, in rank order.

    Collective over `comm` (default: the world). `x` holds the own rows `[num_rows, ...]`; the
    gradients of the fetched rows go back and are added at their owner.
    """
    comm = world() if comm is None else comm
    _check_rows(x, plan, plan.num_rows, comm, "all_gather_rows")
    return AllGatherRows.apply(x, RowsOnGroup(comm, plan))


def add_rows(x: Tensor, plan: RowPlan, *, comm: Communicator | None = None) -> Tensor:
    """Return `[num_rows, ...]`: for each own row the sum of what other ranks hold for it.

    Collective over `comm` (default: the world). `x` holds one row for each fetched row, as
    `all_gather_rows` returns them.
    """
    comm = world() if comm is None else comm
    _check_rows(x, plan, sum(plan.recv_sizes), comm, "add_rows")
    return AddRows.apply(x, RowsOnGroup(comm, plan))


def rows_of(x: Tensor, plan: RowPlan) -> Tensor:
    """Return the rows of `x` that other ranks need."""
    taken = x.index_select(0, plan.send_index)
    if x.requires_grad and not torch.compiler.is_compiling() and checking.active:
        taken.requires_grad_()  # which check mode compares over ranks
    return taken


def _move(
    x: Tensor, send_sizes: tuple[int, ...], recv_sizes: tuple[int, ...], comm: Communicator
) -> Tensor:
    if torch.compiler.is_compiling():
        return traced.all_to_all(x, send_sizes, recv_sizes, comm)
    return comm.all_to_all(x, send_sizes, recv_sizes)


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
