"""A fetch of rows in two halves, both differentiable: start it, work meanwhile, take what came.

Forward, `Depart` sends rows and `Arrive` waits for them; backward, the same two maps send gradients
home and wait for them. Autograd runs backwards in reverse order of creation, so work recorded
between the two halves also lies between them there. What is between the halves is a token without
elements: nobody can read rows that are under way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from unisono.comm import Communicator, Pending
from unisono.errors import UnisonoError
from unisono.operators import LinearMap
from unisono.operators.rows import rows_of
from unisono.topology import RowPlan


class Transfer:
    """Rows under way: to those who need them, or, as gradients, home to their owners.

    Args:
        comm: the ranks.
        rows: which own rows go where.
        home: whether they are on the way back.
    """

    __slots__ = ("answer", "comm", "home", "pending", "rows", "tangent")

    def __init__(self, comm: Communicator, rows: RowPlan, *, home: bool = False) -> None:
        self.comm = comm
        self.rows = rows
        self.home = home
        self.pending: Pending[Tensor] | None = None
        self.answer: Transfer | None = None
        """The transfer of the backward."""
        self.tangent: Transfer | None = None

    def again(self, *, back: bool = False) -> Transfer:
        """Return a transfer of the same rows that has not begun."""
        return Transfer(self.comm, self.rows, home=self.home != back)

    def send(self, x: Tensor) -> Tensor:
        """Begin to move the rows of `x`; return the token."""
        sizes = self.rows.send_sizes, self.rows.recv_sizes
        moved = x if self.home else rows_of(x, self.rows)
        self.pending = self.comm.start.all_to_all(moved, *(sizes[::-1] if self.home else sizes))
        return x.new_empty(0)

    def received(self) -> Tensor:
        """Wait for the rows and return them; at home, what came back for each row is added up."""
        if self.pending is None:
            raise UnisonoError.because(
                "wait() on a transfer of rows",
                "it is not under way: each start() is waited for once",
                None,
                "handle = plan.start(x); rows = handle.wait()",
            )
        pending, self.pending = self.pending, None
        found = pending.wait()
        if not self.home:
            return found
        total = torch.zeros(
            (self.rows.num_rows, *found.shape[1:]), dtype=found.dtype, device=found.device
        )
        return total.index_add_(0, self.rows.send_index, found)


@dataclass(frozen=True)
class Half:
    """The plan of a half of a transfer."""

    transfer: Transfer
    is_second: bool

    @property
    def adjoint(self) -> Half:
        """The other half of the answer, which the backward of the second half begins."""
        if self.is_second:
            self.transfer.answer = self.transfer.again(back=True)
        return Half(self.transfer.answer or self.transfer.again(back=True), not self.is_second)

    @property
    def tangent(self) -> Half:
        """The same half for a tangent, which travels by itself."""
        if not self.is_second:
            self.transfer.tangent = self.transfer.again()
        return Half(self.transfer.tangent or self.transfer.again(), self.is_second)


class Depart(LinearMap):
    """Rows -> token; they are under way."""

    adjoint: ClassVar[type[LinearMap]]

    @staticmethod
    def kernel(x: Tensor, plan: Half) -> Tensor:
        """See `LinearMap`."""
        return plan.transfer.send(x)


class Arrive(LinearMap):
    """Token -> the rows that came."""

    adjoint = Depart

    @staticmethod
    def kernel(x: Tensor, plan: Half) -> Tensor:  # noqa: ARG004
        """See `LinearMap`."""
        return plan.transfer.received()


Depart.adjoint = Arrive


class RowsUnderWay:
    """What `GraphPlan.start` returns: `wait()` gives the rows."""

    def __init__(self, token: Tensor, transfer: Transfer | None) -> None:
        self._token = token
        """Without elements; the rows themselves where there is no transfer."""
        self._transfer = transfer

    def wait(self) -> Tensor:
        """Return the halo rows `[num_halo, ...]`; call it once."""
        if self._transfer is None:
            return self._token
        return Arrive.apply(self._token, Half(self._transfer, is_second=True))


def start_rows(x: Tensor, rows: RowPlan, comm: Communicator) -> RowsUnderWay:
    """Begin to fetch rows. Collective over `comm`; so is the backward."""
    transfer = Transfer(comm, rows)
    return RowsUnderWay(Depart.apply(x, Half(transfer, is_second=False)), transfer)
