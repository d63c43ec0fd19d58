"""Tensors between ranks as they are: rows to all of them, a permutation, one message.

`all_to_all` is its own adjoint with the sizes swapped, `permute` with the inverse permutation; the
adjoint of `send` is `recv`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.comm import Communicator
from unisono.comm.arguments import check_sizes, pack_shape, unpack_shape, whole_numbers
from unisono.comm.collectives import Like
from unisono.errors import CollectiveMismatch, MeshError, PartitionError
from unisono.operators import traced
from unisono.operators.linear import LinearMap, identity, set_adjoint
from unisono.operators.plans import anchor, check_call, check_comm, like_of


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
        """Return the rows received."""
        if torch.compiler.is_compiling():
            return traced.all_to_all(x, plan.send_sizes, plan.recv_sizes, plan.comm)
        return plan.comm.all_to_all(x, plan.send_sizes, plan.recv_sizes)


@dataclass(frozen=True)
class PermutePlan:
    """Where each rank's tensor goes, and the shape each rank holds before and after."""

    comm: Communicator
    destination: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype

    @property
    def adjoint(self) -> PermutePlan:
        """The plan of the way back."""
        inverse = tuple(map(self.destination.index, range(len(self.destination))))
        shapes = tuple(self.shapes[source] for source in inverse)
        return PermutePlan(self.comm, inverse, shapes, self.dtype)


class Permute(LinearMap):
    """My tensor goes to rank `destination[me]`."""

    @staticmethod
    def kernel(x: Tensor, plan: PermutePlan) -> Tensor:
        """Return the tensor that comes here."""
        me = plan.comm.rank
        source = plan.destination.index(me)
        got = plan.comm.exchange(
            {plan.destination[me]: x}, {source: (plan.shapes[source], plan.dtype)}
        )
        return got[source]


@dataclass(frozen=True)
class MessagePlan:
    """One message: the other rank, and what travels."""

    comm: Communicator
    peer: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Send(LinearMap):
    """The tensor leaves; what stays is a token without elements."""

    @staticmethod
    def kernel(x: Tensor, plan: MessagePlan) -> Tensor:
        """Return the token."""
        plan.comm.send(x, plan.peer)
        return x.new_empty(0)


class Recv(LinearMap):
    """The tensor arrives; the input is a token without elements."""

    @staticmethod
    def kernel(x: Tensor, plan: MessagePlan) -> Tensor:
        """Return the tensor."""
        return plan.comm.recv((plan.shape, plan.dtype), plan.peer)


set_adjoint(AllToAll)
set_adjoint(Permute)
set_adjoint(Send, Recv)


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
    check_call(x, comm, "all_to_all")
    if x.dim() == 0:
        raise PartitionError.because(
            "all_to_all of a tensor without dims", "no rows to send", None, "x.reshape(1)"
        )
    sent = check_sizes(send_sizes, comm.size, "all_to_all", total=x.shape[0], what="send_sizes")
    if recv_sizes is None:
        received = tuple(row[comm.rank] for row in comm.all_gather_ints(sent))
    else:
        received = check_sizes(recv_sizes, comm.size, "all_to_all", what="recv_sizes")
        if received[comm.rank] != sent[comm.rank]:
            raise PartitionError.because(
                f"all_to_all(send_sizes={list(sent)}, recv_sizes={list(received)})",
                f"rank {comm.rank} of {comm.size} sends itself {sent[comm.rank]} rows",
                f"{sent[comm.rank]} != {received[comm.rank]}",
                "recv_sizes[q] is what rank q sends here; None learns it",
            )
    if comm.size == 1:
        return identity(x)
    return AllToAll.apply(x, AllToAllPlan(comm, sent, received))


def permute(
    x: Tensor, destination: Sequence[int] | Callable[[int], int], *, comm: Communicator
) -> Tensor:
    """Return the tensor of the rank whose destination is this one; gradients go the way back.

    Collective over `comm`. Shapes may differ between ranks; one small exchange learns them.

    Args:
        x: this rank's tensor.
        destination: for each rank the rank that gets its tensor (a list or a function), a
            permutation, the same on every rank. `lambda r: (r + 1) % comm.size` is a ring.
        comm: the ranks.
    """
    check_call(x, comm, "permute")
    listed = [destination(r) for r in range(comm.size)] if callable(destination) else destination
    targets = whole_numbers(listed)
    if targets is None or sorted(targets) != list(range(comm.size)):
        raise MeshError.because(
            f"permute(destination={listed!r})",
            f"{comm.size} ranks",
            "each rank must be named exactly once",
            "lambda r: (r + 1) % comm.size",
        )
    if comm.size == 1:
        return identity(x)
    records = comm.all_gather_ints([*targets, *pack_shape(x.shape, x.dtype)])
    if any(record[: comm.size] != targets for record in records):
        named = {r: f"destination {list(rec[: comm.size])}" for r, rec in enumerate(records)}
        raise CollectiveMismatch("permute with different destinations: " + str(named), named)
    shapes = tuple(unpack_shape(record[comm.size :])[0] for record in records)
    return Permute.apply(x, PermutePlan(comm, targets, shapes, x.dtype))


def send(x: Tensor, dst: int, *, comm: Communicator) -> Tensor:
    """Send `x` to rank `dst`, which calls `recv`; return a token without elements.

    Not collective. In the backward this rank receives the gradient, so the token must be part of
    what is differentiated here: `attach(loss, token)`.
    """
    check_call(x, comm, "send")
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
