"""Sums over ranks and their adjoints: on all ranks, on one, or as a value that counts once.

Spaces: R is a value that every rank holds equal and that counts once, I each rank's own tensor.
`copy` (R -> I) is the identity whose gradient is summed, `sum_to_replicated` (I -> R) the sum whose
gradient is the identity; `all_sum_reduce` (I -> I) sums both ways.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from unisono.comm import Communicator
from unisono.comm.arguments import check_rank, check_tensor
from unisono.comm.collectives import Like
from unisono.errors import PartitionError
from unisono.operators import traced
from unisono.operators.linear import LinearMap, identity, set_adjoint
from unisono.operators.plans import GroupPlan, anchor, announce, check_call, check_comm, like_of


def _sum_over_ranks(x: Tensor, plan: GroupPlan) -> Tensor:
    """Return the sum over ranks, without autograd."""
    comm = plan.comm
    if torch.compiler.is_compiling():
        return traced.all_reduce(x, comm)
    if x.layout is not torch.strided:
        return comm.all_reduce(x)
    # The operator has checked its tensor; the verb would do so once more.
    out = x.detach().clone(memory_format=torch.contiguous_format)
    return comm._perform(comm._reduced(out, x, "sum", None))


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
            total = block if fan.comm.size == 1 else fan.comm.reduce(block, fan.root)
            if fan.is_root:
                received = identity(x) if total is x else total
        return x.new_empty(plan.empty, dtype=plan.dtype) if received is None else received


set_adjoint(AllSumReduceMap)
set_adjoint(SumToReplicated, Copy)
set_adjoint(BroadcastMap, SumReduceMap)


def all_sum_reduce(x: Tensor, *, comm: Communicator) -> Tensor:
    """Return the sum of `x` over all ranks, on every rank. Collective; any order of derivative.

    A plain linear map on the direct sum of the ranks' tensors (I -> I): gradients are summed over
    ranks too. For a value that every rank uses alike (a loss) use `sum_to_replicated`.
    """
    check_call(x, comm, "all_sum_reduce")
    return identity(x) if comm.size == 1 else AllSumReduceMap.apply(x, GroupPlan(comm))


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
