"""Sums over ranks and their adjoints: on all ranks, on one, or as a value that counts once.

Spaces: R is a value that every rank holds equal and that counts once, I each rank's own tensor.
`copy` (R -> I) is the identity whose gradient is summed, `sum_to_replicated` (I -> R) the sum whose
gradient is the identity; `all_sum_reduce` (I -> I) sums both ways.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from unisono.comm import Communicator
from unisono.comm.arguments import check_rank, check_tensor, dense
from unisono.comm.collectives import Like
from unisono.comm.perform import EXCHANGE_TAG
from unisono.errors import PartitionError, UnisonoError
from unisono.operators import traced
from unisono.operators.linear import LinearMap, identity, set_adjoint
from unisono.operators.plans import GroupPlan, anchor, announce, check_call, check_comm, like_of


def _sum_over_ranks(x: Tensor, plan: GroupPlan) -> Tensor:
    """Return the sum over ranks, without autograd."""
    sent = x if plan.wire is None else x.to(plan.wire)
    comm = plan.comm
    if torch.compiler.is_compiling():
        total = traced.all_reduce(sent, comm)
    elif sent.layout is torch.strided:
        # The operator has checked its tensor; the verb would do so once more.
        out = sent.detach().clone(memory_format=torch.contiguous_format)
        total = comm._perform(comm._reduced(out, sent, "sum", None))
    else:
        total = comm.all_reduce(sent)
    return total if plan.wire is None else total.to(x.dtype)


class AllSumReduceMap(LinearMap):
    """Every rank's tensor becomes the sum of all; the gradients are summed the same way."""

    kernel = staticmethod(_sum_over_ranks)


class SumToReplicated(LinearMap):
    """I -> R: the ranks' terms become one replicated sum."""

    kernel = staticmethod(_sum_over_ranks)


class Copy(LinearMap):
    """R -> I: each rank goes on with its own copy of a replicated value."""

    @staticmethod
    def kernel(x: Tensor, plan: GroupPlan) -> Tensor:
        """Return `x`."""
        return identity(x)


@dataclass(frozen=True)
class Fan:
    """Ranks that share one block, as one of them sees it."""

    comm: Communicator
    root: int
    """Rank of `comm` that holds the block, or gets the sum."""
    shape: tuple[int, ...]
    """Shape of the block."""
    is_root: bool
    is_peer: bool
    """Whether this rank's block on the other side is this one."""
    is_agreed: bool = False
    """Whether all ranks know shape and dtype already, so that no call has to compare them."""

    def uses_messages(self, dtype: torch.dtype) -> bool:
        """Whether a block travels as messages, the same answer on all ranks.

        A collective ends when all ranks have come to it. A small message is in shared memory at
        once, so its sender goes on, and only a receiver ever waits.
        """
        comm = self.comm
        return (
            self.is_agreed
            and comm.backend == "shm"
            and comm.size <= _FEW_RANKS
            and dtype in (torch.float32, torch.float64)
            and 0 < prod(self.shape) * dtype.itemsize <= _SMALL_BYTES
            and comm.device.type == "cpu"
            and not torch.compiler.is_compiling()
        )

    def exchange(
        self, op: str, sends: dict[int, Tensor], recvs: dict[int, Tensor], nbytes: int
    ) -> None:
        """Send and receive blocks; what was sent may be changed afterwards.

        Args:
            op: what the call is named in traces and reports.
            sends: a block for each rank that gets one.
            recvs: memory for what each rank sends.
            nbytes: of a block, for traces.
        """
        transfer = self.comm._messages(op, sends, recvs, _TAG, dict)
        transfer.call.sent = nbytes if sends else 0
        transfer.call.received = nbytes if recvs else 0
        pending = self.comm._perform(transfer, True)
        if recvs or not pending.done():
            pending.wait()


_SMALL_BYTES = 16 * 1024
_FEW_RANKS = 4
_TAG = EXCHANGE_TAG + 1
"""Apart from the messages of halos, so that each kind has an order of its own."""


def _broadcast_by_messages(x: Tensor, fan: Fan, dtype: torch.dtype) -> Tensor:
    """Return the root's block."""
    if fan.is_root:
        block = x.detach().clone(memory_format=torch.contiguous_format)
        peers = [rank for rank in range(fan.comm.size) if rank != fan.root]
        fan.exchange("broadcast", dict.fromkeys(peers, block), {}, block.nbytes)
    else:
        block = torch.empty(fan.shape, dtype=dtype)
        fan.exchange("broadcast", {}, {fan.root: block}, block.nbytes)
    return block


def _reduce_by_messages(x: Tensor, fan: Fan) -> Tensor | None:
    """Return the sum on the root, in the order of ranks, None elsewhere."""
    block = dense(x.detach())
    if not fan.is_root:
        fan.exchange("reduce", {fan.root: block}, {}, block.nbytes)
        return None
    ranks = range(fan.comm.size)
    parts = {rank: torch.empty_like(block) for rank in ranks if rank != fan.root}
    fan.exchange("reduce", {}, parts, block.nbytes)
    first, *rest = [parts.get(rank, block) for rank in ranks]
    total = first + rest[0]
    for part in rest[1:]:
        total += part
    return total


@dataclass(frozen=True)
class FanPlan:
    """All fans of one rank, in an order that is the same on all ranks."""

    fans: tuple[Fan, ...]
    dtype: torch.dtype
    empty: tuple[int, ...] = (0,)
    """Shape of the result on a rank that gets none."""
    was_empty: tuple[int, ...] = (0,)
    """Shape of the input on a rank that has none."""
    _variants: dict[tuple[int, ...], FanPlan] = field(
        default_factory=dict, compare=False, repr=False
    )

    def for_empty(self, shape: tuple[int, ...]) -> FanPlan:
        """Return the plan with another `was_empty`; kept for the next call."""
        if self.was_empty == shape:
            return self
        variant = self._variants.get(shape)
        if variant is None:
            variant = self._variants[shape] = replace(self, was_empty=shape, _variants={})
        return variant

    @cached_property
    def adjoint(self) -> FanPlan:
        """The plan of the adjoint."""
        if self.empty == self.was_empty:
            return self
        return replace(self, empty=self.was_empty, was_empty=self.empty, _variants={})

    @property
    def is_identity(self) -> bool:
        """Whether this rank's block stays where it is and no other rank is involved."""
        return len(self.fans) == 1 and self.fans[0].comm.size == 1


class BroadcastMap(LinearMap):
    """Each root's block on all its peers."""

    @staticmethod
    def kernel(x: Tensor, plan: FanPlan) -> Tensor:
        """Return the block that belongs here."""
        received: Tensor | None = None
        for fan in plan.fans:
            if fan.comm.size == 1:
                block = identity(x)
            elif fan.uses_messages(plan.dtype):
                block = _broadcast_by_messages(x, fan, plan.dtype)
            else:
                sent = x if fan.is_root else None
                block = fan.comm.broadcast(sent, fan.root, like=(fan.shape, plan.dtype))
            if fan.is_peer:
                received = block
        return x.new_empty(plan.empty, dtype=plan.dtype) if received is None else received


class SumReduceMap(LinearMap):
    """The sum of the peers' blocks on each root."""

    @staticmethod
    def kernel(x: Tensor, plan: FanPlan) -> Tensor:
        """Return the sum, or nothing."""
        received: Tensor | None = None
        for fan in plan.fans:
            block = x if fan.is_peer else x.new_zeros(fan.shape, dtype=plan.dtype)
            if fan.comm.size == 1:
                total = block
            elif fan.uses_messages(plan.dtype):
                total = _reduce_by_messages(block, fan)
            else:
                total = fan.comm.reduce(block, fan.root)
            if fan.is_root:
                received = identity(x) if total is x else total
        return x.new_empty(plan.empty, dtype=plan.dtype) if received is None else received


set_adjoint(AllSumReduceMap)
set_adjoint(SumToReplicated, Copy)
set_adjoint(BroadcastMap, SumReduceMap)


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
    check_call(x, comm, "all_sum_reduce")
    if comm.size == 1:
        return identity(x)
    return AllSumReduceMap.apply(x, GroupPlan(comm, _wire_dtype(wire, x.dtype)))


def _wire_dtype(wire: str | torch.dtype | None, x_dtype: torch.dtype) -> torch.dtype | None:
    if wire is None:
        return None
    dtype = getattr(torch, wire, None) if isinstance(wire, str) else wire
    is_float = isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1
    if not is_float or not x_dtype.is_floating_point:  # imaginary parts, integers would be lost
        raise UnisonoError.because(
            f"all_sum_reduce(wire={wire!r})",
            f"a tensor of {x_dtype}",
            None,
            'wire="bfloat16", "float16" or "float32", of a real floating-point tensor',
        )
    return None if dtype == x_dtype else dtype


def copy(x: Tensor, *, comm: Communicator) -> Tensor:
    """Return `x`; its gradient is the sum over ranks. Its backward is collective.

    For a value that all ranks hold equal (R) and each then uses for its own share of the work (I),
    such as a weight kept on every rank.
    """
    check_call(x, comm, "copy")
    return identity(x) if comm.size == 1 else Copy.apply(x, GroupPlan(comm))


def sum_to_replicated(x: Tensor, *, comm: Communicator) -> Tensor:
    """Return the sum of `x` over ranks; its gradient passes unchanged. Collective.

    For terms that each rank computed (I) and a result that every rank then uses alike (R), such as
    a loss: each rank calls `backward()` once, and no gradient is counted twice.
    """
    check_call(x, comm, "sum_to_replicated")
    return identity(x) if comm.size == 1 else SumToReplicated.apply(x, GroupPlan(comm))


def broadcast(
    x: Tensor | None, src: int = 0, *, like: Like | None = None, comm: Communicator
) -> Tensor:
    """Return the tensor of rank `src` on every rank; the gradients are summed on `src`.

    Collective over `comm`, and so is the backward: every rank must use its result (or `attach` it).

    Args:
        x: the tensor on `src`. Elsewhere None, or anything: only a tensor without elements counts,
            as the (empty) input that the result's graph hangs on.
        src: rank of `comm` that holds it.
        like: shape and dtype (or a tensor like it). Given on every rank, nothing has to be
            announced beforehand, and every rank's result takes part in autograd.
        comm: the ranks.
    """
    check_comm(comm, "broadcast")
    src = check_rank(src, comm.size, "src", "broadcast")
    if comm.size == 1:
        return identity(check_tensor(x, comm.device, "broadcast"))
    if like is None:
        shape, dtype, needs_grad, _ = announce(x, src, (), comm, "broadcast")
    else:
        (shape, dtype), needs_grad = like_of(like), torch.is_grad_enabled()
        if comm.rank == src:
            block = check_tensor(x, comm.device, "broadcast")
            if (tuple(block.shape), block.dtype) != (shape, dtype):  # others would read too little
                raise PartitionError.because(
                    f"broadcast(like=({list(shape)}, {dtype}))",
                    f"rank {src} holds a tensor of shape {list(block.shape)}, {block.dtype}",
                    None,
                    "like=(x.shape, x.dtype) of that rank, or no like",
                )
    block = x if comm.rank == src and x is not None else anchor(dtype, needs_grad, comm, x)
    fan = Fan(comm, src, shape, comm.rank == src, True)
    return BroadcastMap.apply(block, FanPlan((fan,), dtype, was_empty=tuple(block.shape)))


def sum_reduce(x: Tensor, dst: int = 0, *, comm: Communicator) -> Tensor:
    """Return the sum of `x` over ranks on rank `dst`, a tensor without elements elsewhere.

    Collective over `comm`; the backward sends the root's gradient to all, so every rank must use
    its result (the empty one too: `attach` does that).
    """
    check_call(x, comm, "sum_reduce")
    dst = check_rank(dst, comm.size, "dst", "sum_reduce")
    if comm.size == 1:
        return identity(x)
    fan = Fan(comm, dst, tuple(x.shape), comm.rank == dst, True)
    return SumReduceMap.apply(x, FanPlan((fan,), x.dtype))
