"""A fetch of rows in two halves, both differentiable: start it, work meanwhile, take what came.

Forward, `Depart` sends rows and `Arrive` waits for them; backward, the same two maps send gradients
home and wait for them. Autograd runs backwards in reverse order of creation, so work recorded
between the two halves also lies between them there. What is between the halves is a token without
elements: nobody can read rows that are under way.
"""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from unisono.comm import Communicator, Pending
from unisono.comm.health import check as checking
from unisono.errors import UnisonoError
from unisono.operators import LinearMap, set_adjoint
from unisono.topology import RowPlan


class Transfer:
    """Rows under way: to those who need them, or, as gradients, home to their owners.

    The plan of both halves. It can be used again when what was under way has been received.

    Args:
        comm: the ranks.
        rows: which own rows go where.
        home: whether they are on the way back.
    """

    def __init__(self, comm: Communicator, rows: RowPlan, *, home: bool = False) -> None:
        self.comm = comm
        self.rows = rows
        self.home = home
        self.pending: Pending[Tensor] | None = None

    @cached_property
    def adjoint(self) -> Transfer:
        """The way back, which the backward of the second half begins and that of the first ends."""
        return Transfer(self.comm, self.rows, home=not self.home)

    @cached_property
    def tangent(self) -> Transfer:
        """The same way for a tangent, which travels by itself."""
        return Transfer(self.comm, self.rows, home=self.home)

    def send(self, x: Tensor) -> Tensor:
        """Begin to move the rows of `x`; return the token."""
        sizes = self.rows.send_sizes, self.rows.recv_sizes
        moved = x if self.home else x.index_select(0, self.rows.send_index)
        if x.requires_grad and checking.active:
            moved.requires_grad_()  # which check mode compares over ranks
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
        arrived = pending.wait()
        if not self.home:
            return arrived
        total = torch.zeros(
            (self.rows.num_rows, *arrived.shape[1:]), dtype=arrived.dtype, device=arrived.device
        )
        return total.index_add_(0, self.rows.send_index, arrived)


class Depart(LinearMap):
    """Rows -> token; they are under way."""

    adjoint: ClassVar[type[LinearMap]]

    @staticmethod
    def kernel(x: Tensor, plan: Transfer) -> Tensor:
        """See `LinearMap`."""
        return plan.send(x)


class Arrive(LinearMap):
    """Token -> the rows that came."""

    @staticmethod
    def kernel(x: Tensor, plan: Transfer) -> Tensor:  # noqa: ARG004
        """See `LinearMap`."""
        return plan.received()


set_adjoint(Depart, Arrive)


class RowsUnderWay:
    """What `GraphPlan.start` returns: `wait()` gives the rows.

    Args:
        token: without elements; the rows themselves where there is no transfer.
        transfer: what is under way.
    """

    def __init__(self, token: Tensor, transfer: Transfer | None = None) -> None:
        self._token = token
        self._transfer = transfer

    def wait(self) -> Tensor:
        """Return the halo rows `[num_halo, ...]`; call it once."""
        return self._token if self._transfer is None else Arrive.apply(self._token, self._transfer)
