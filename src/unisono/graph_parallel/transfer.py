"""A fetch of rows in two halves, both differentiable: start it, work meanwhile, take what came.

Four linear maps in two pairs. Forward, `Depart` sends rows and `Arrive` waits for them; backward,
`DepartBack` sends gradients home and `ArriveBack` waits and adds. Autograd runs backwards in
reverse order of creation, so work recorded between the two halves also lies between them there.
What is between the halves is a token without elements: nobody can read rows that are under way.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from unisono.comm import Communicator, Pending
from unisono.errors import UnisonoError
from unisono.operators import LinearMap
from unisono.operators.rows import rows_of
from unisono.topology import RowPlan


class Transfer:
    """Rows under way, in one direction, and the answering transfer of the backward."""

    __slots__ = ("answer", "comm", "pending", "rows", "tangent")

    def __init__(self, comm: Communicator, rows: RowPlan) -> None:
        self.comm = comm
        self.rows = rows
        self.pending: Pending[Tensor] | None = None
        self.answer: Transfer | None = None
        self.tangent: Transfer | None = None

    def fresh(self) -> Transfer:
        """Return a transfer of the same rows that has not begun."""
        return Transfer(self.comm, self.rows)

    def send(self, x: Tensor, *, home: bool) -> Tensor:
        """Begin to move the rows of `x`; return the token."""
        rows = self.rows
        sizes = (rows.recv_sizes, rows.send_sizes) if home else (rows.send_sizes, rows.recv_sizes)
        self.pending = self.comm.start.all_to_all(x, *sizes)
        return x.new_empty(0)

    def received(self) -> Tensor:
        """Wait for the rows and return them."""
        if self.pending is None:
            raise UnisonoError.because(
                "wait() on a transfer of rows",
                "it is not under way: each start() is waited for once",
                None,
                "handle = plan.start(x); rows = handle.wait()",
            )
        pending, self.pending = self.pending, None
        return pending.wait()


class Departure:
    """The plan of a first half."""

    __slots__ = ("transfer",)

    def __init__(self, transfer: Transfer) -> None:
        self.transfer = transfer

    @property
    def adjoint(self) -> Arrival:
        """The second half of the answer, which the backward of the second half has begun."""
        return Arrival(self.transfer.answer or self.transfer.fresh())

    @property
    def tangent(self) -> Departure:
        """The same for a tangent, which travels by itself."""
        self.transfer.tangent = self.transfer.fresh()
        return Departure(self.transfer.tangent)


class Arrival:
    """The plan of a second half."""

    __slots__ = ("transfer",)

    def __init__(self, transfer: Transfer) -> None:
        self.transfer = transfer

    @property
    def adjoint(self) -> Departure:
        """The first half of a new answer: each backward pass makes its own."""
        self.transfer.answer = self.transfer.fresh()
        return Departure(self.transfer.answer)

    @property
    def tangent(self) -> Arrival:
        """The same for a tangent."""
        return Arrival(self.transfer.tangent or self.transfer.fresh())


class Depart(LinearMap):
    """Own rows -> token; the rows that others need are under way."""

    adjoint: ClassVar[type[LinearMap]]

    @staticmethod
    def kernel(x: Tensor, plan: Departure) -> Tensor:
        """See `LinearMap`."""
        return plan.transfer.send(rows_of(x, plan.transfer.rows), home=False)


class Arrive(LinearMap):
    """Token -> the fetched rows."""

    adjoint: ClassVar[type[LinearMap]]

    @staticmethod
    def kernel(x: Tensor, plan: Arrival) -> Tensor:  # noqa: ARG004
        """See `LinearMap`."""
        return plan.transfer.received()


class DepartBack(LinearMap):
    """Gradients of fetched rows -> token; they are on their way home."""

    adjoint = Arrive

    @staticmethod
    def kernel(x: Tensor, plan: Departure) -> Tensor:
        """See `LinearMap`."""
        return plan.transfer.send(x, home=True)


class ArriveBack(LinearMap):
    """Token -> for each own row the sum of what came back for it."""

    adjoint = Depart

    @staticmethod
    def kernel(x: Tensor, plan: Arrival) -> Tensor:  # noqa: ARG004
        """See `LinearMap`."""
        returned, rows = plan.transfer.received(), plan.transfer.rows
        total = torch.zeros(
            (rows.num_rows, *returned.shape[1:]), dtype=returned.dtype, device=returned.device
        )
        return total.index_add_(0, rows.send_index, returned)


Depart.adjoint = ArriveBack
Arrive.adjoint = DepartBack


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
        return Arrive.apply(self._token, Arrival(self._transfer))


def start_rows(x: Tensor, rows: RowPlan, comm: Communicator) -> RowsUnderWay:
    """Begin to fetch rows. Collective over `comm`; so is the backward."""
    transfer = Transfer(comm, rows)
    return RowsUnderWay(Depart.apply(x, Departure(transfer)), transfer)
