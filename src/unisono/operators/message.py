"""`send` and `recv`: one tensor from one rank to another, and its gradient back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.comm import Communicator
from unisono.comm.arguments import check_tensor
from unisono.comm.collectives import Like
from unisono.operators.agreement import anchor, like_of
from unisono.operators.linear import LinearMap
from unisono.operators.plans import check_comm


@dataclass(frozen=True)
class MessagePlan:
    """One message: the other rank, and what travels."""

    comm: Communicator
    peer: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def adjoint(self) -> MessagePlan:
        """The plan of the message back."""
        return self


class Send(LinearMap):
    """The tensor leaves; what stays is a token without elements."""

    @staticmethod
    def kernel(x: Tensor, plan: MessagePlan) -> Tensor:
        """See `LinearMap`."""
        plan.comm.send(x, plan.peer)
        return x.new_empty(0)


class Recv(LinearMap):
    """The tensor arrives; the input is a token without elements."""

    adjoint = Send

    @staticmethod
    def kernel(x: Tensor, plan: MessagePlan) -> Tensor:
        """See `LinearMap`."""
        return plan.comm.recv((plan.shape, plan.dtype), plan.peer)


Send.adjoint = Recv


def send(x: Tensor, dst: int, *, comm: Communicator) -> Tensor:
    """Send `x` to rank `dst`, which calls `recv`; return a token without elements.

    Not collective. In the backward this rank receives the gradient, so the token must be part of
    what is differentiated here: `attach(loss, token)`.
    """
    check_comm(comm, "send")
    check_tensor(x, comm.device, "send")
    return Send.apply(x, MessagePlan(comm, dst, tuple(x.shape), x.dtype))


def recv(like: Like, src: int, *, token: Tensor | None = None, comm: Communicator) -> Tensor:
    """Return the tensor that rank `src` sends; its gradient is sent back there.

    Not collective. `like` gives shape and dtype. The result takes part in autograd whenever grad
    mode is on, so it must be used if the sender differentiates. It hangs on `token` (an empty
    tensor, such as `send` returns) when one is given, which orders the backward of both.
    """
    check_comm(comm, "recv")
    shape, dtype = like_of(like)
    return Recv.apply(anchor(dtype, True, comm, token), MessagePlan(comm, src, shape, dtype))
