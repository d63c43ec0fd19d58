"""Blocks along one dim, joined and cut: on all ranks, on one, or as a value that counts once.

Spaces: S is sharded, I each rank's own, R a value that every rank holds equal and that counts once.
`all_gather` (S -> I) and `reduce_scatter` (I -> S) are adjoints, `concat_replicated` (S -> R) and
`slice_replicated` (R -> S), and `gather` and `scatter` between all ranks and one. `move_cut`
(S -> S) cuts another dim, by an `all_to_all`; it is its own adjoint with the dims changed over.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unisono.comm import Communicator
from unisono.comm.arguments import check_dim, check_rank, check_sizes, check_tensor
from unisono.errors import PartitionError, UnisonoError
from unisono.operators import traced
from unisono.operators.linear import LinearMap, identity, set_adjoint
from unisono.operators.move import AllToAll, AllToAllPlan
from unisono.operators.plans import anchor, announce, check_call, check_comm
from unisono.topology.decompose import split_sizes


@dataclass(frozen=True)
class BlockPlan:
    """A movement of blocks along one dim; rank r holds `sizes[r]` of it."""

    comm: Communicator
    dim: int
    sizes: tuple[int, ...]
    root: int = 0
    """Rank that holds the whole, where one does."""
    shape: tuple[int, ...] = ()
    """Shape of this rank's block (kept where a root holds the whole)."""
    dtype: torch.dtype = torch.float32
    """Dtype of the blocks (kept where a root holds the whole)."""


def block_plan(
    x: Tensor, dim: int, sizes: Sequence[int] | None, comm: Communicator, verb: str
) -> BlockPlan:
    """Return the plan for joining blocks: `x` is this rank's. Collective when `sizes` is None."""
    if not isinstance(comm, Communicator):
        check_comm(comm, verb)
    check_tensor(x, comm._device_for(x), verb)
    if x.dim() == 0:
        raise PartitionError.because(
            f"{verb} of a tensor without dims", "nothing to join along", None, "x.reshape(1)"
        )
    dim = check_dim(dim, x, verb)
    if sizes is None:
        if comm.size == 1:
            return BlockPlan(comm, dim, (x.shape[dim],))
        if torch.compiler.is_compiling():  # torch quotes it in its own error
            others = comm.size - 1
            raise PartitionError.because(
                f"{verb} without sizes inside torch.compile(fullgraph=True)",
                f"a block of shape {list(x.shape)}; how long those of the other {others} ranks are "
                "along the joined dim is learned by an exchange, and a graph must know it before",
                f"{x.shape[dim]} + the lengths of {others} other blocks = ?",
                "sizes=[...], the length of each block; natoms=N for the balanced split of N",
            )
        return BlockPlan(comm, dim, comm._lengths(x, dim, verb))
    lengths = check_sizes(sizes, comm.size, verb)
    if lengths[comm.rank] != x.shape[dim]:
        raise PartitionError.because(
            f"{verb}(sizes={list(lengths)}, dim={dim}) on rank {comm.rank}",
            f"a block of shape {list(x.shape)}",
            f"sizes[{comm.rank}] = {lengths[comm.rank]} != {x.shape[dim]}",
        )
    return BlockPlan(comm, dim, lengths)


def whole_plan(
    x: Tensor, dim: int, sizes: Sequence[int] | None, comm: Communicator, verb: str
) -> BlockPlan:
    """Return the plan for cutting: `x` is whole along `dim`. Local; balanced without `sizes`."""
    check_call(x, comm, verb)
    if x.dim() == 0:
        raise PartitionError.because(
            f"{verb} of a tensor without dims", "nothing to cut along", None, "x.reshape(1)"
        )
    dim = check_dim(dim, x, verb)
    rows = x.shape[dim]
    if sizes is None:
        return BlockPlan(comm, dim, split_sizes(rows, comm.size))
    return BlockPlan(comm, dim, check_sizes(sizes, comm.size, verb, total=rows))


def _joined(x: Tensor, plan: BlockPlan) -> Tensor:
    """Return the blocks of all ranks joined, without autograd."""
    if torch.compiler.is_compiling():
        return traced.all_gather(x, plan.dim, plan.sizes, plan.comm)
    # The plan was checked when it was made; the verb would do so once more.
    return plan.comm._perform(plan.comm._joined(x, plan.dim, plan.sizes))


class AllGatherMap(LinearMap):
    """S -> I: every rank gets all blocks, each for its own use."""

    kernel = staticmethod(_joined)


class ReduceScatterMap(LinearMap):
    """I -> S: the ranks' tensors are summed and each rank keeps its block."""

    @staticmethod
    def kernel(x: Tensor, plan: BlockPlan) -> Tensor:
        """Return the own block of the sum."""
        if torch.compiler.is_compiling():
            return traced.reduce_scatter(x, plan.dim, plan.sizes, plan.comm)
        return plan.comm._perform(plan.comm._reduced_block(x, plan.dim, plan.sizes))


class ConcatReplicated(LinearMap):
    """S -> R: the blocks of all ranks become one replicated tensor."""

    kernel = staticmethod(_joined)


class SliceReplicated(LinearMap):
    """R -> S: each rank keeps its block of a replicated tensor."""

    @staticmethod
    def kernel(x: Tensor, plan: BlockPlan) -> Tensor:
        """Return a copy of the own block."""
        rank, sizes = plan.comm.rank, plan.sizes
        block = x.narrow(plan.dim, sum(sizes[:rank]), sizes[rank])
        return block.clone(memory_format=torch.contiguous_format)


class Scatter(LinearMap):
    """Each rank gets its block of the root's tensor; the others' input has no elements."""

    @staticmethod
    def kernel(x: Tensor, plan: BlockPlan) -> Tensor:
        """Return the own block."""
        comm, root = plan.comm, plan.root
        whole = x if comm.rank == root else None
        like = (plan.shape, plan.dtype)
        return comm.scatter(whole, root, plan.dim, plan.sizes, like=like)


class Gather(LinearMap):
    """The root gets all blocks joined; the others' output has no elements."""

    @staticmethod
    def kernel(x: Tensor, plan: BlockPlan) -> Tensor:
        """Return the joined blocks, or nothing."""
        joined = plan.comm.gather(x, plan.root, plan.dim, plan.sizes)
        return x.new_empty(0) if joined is None else joined


set_adjoint(AllGatherMap, ReduceScatterMap)
set_adjoint(ConcatReplicated, SliceReplicated)
set_adjoint(Scatter, Gather)


def move_cut(
    x: Tensor,
    source: int,
    dest: int,
    source_sizes: Sequence[int] | None = None,
    dest_sizes: Sequence[int] | None = None,
    *,
    comm: Communicator,
) -> Tensor:
    """Return this rank's block along `dest` of a tensor whose blocks along `source` ranks hold.

    Collective over `comm`; gradients go the way back. What Ulysses does with a sequence and the
    heads of an attention: `move_cut(q, -2, -3, comm=comm)` has all tokens of some heads.

    Args:
        x: own block along `source`, whole along `dest`.
        source: dim that is cut now.
        dest: dim that is cut afterwards.
        source_sizes: lengths of the blocks along `source`; without them one small exchange learns
            them.
        dest_sizes: lengths of the blocks along `dest`; default: balanced.
        comm: the ranks.
    """
    check_call(x, comm, "move_cut")
    if x.dim() < 2 or check_dim(source, x, "move_cut") == check_dim(dest, x, "move_cut"):
        raise PartitionError.because(
            f"move_cut(source={source}, dest={dest}) of a tensor of shape {list(x.shape)}",
            "two different dims are needed",
            None,
            "all_gather(x, dim, comm=comm) for a dim that is whole afterwards",
        )
    later = whole_plan(x, dest, dest_sizes, comm, "move_cut")
    now = block_plan(x, source, source_sizes, comm, "move_cut")
    if comm.size == 1:
        return identity(x)
    parts = x.split(later.sizes, later.dim)
    shapes: list[list[int]] = []
    for length in now.sizes:
        shape = list(x.shape)
        shape[now.dim], shape[later.dim] = length, later.sizes[comm.rank]
        shapes.append(shape)
    sent, received = tuple(part.numel() for part in parts), tuple(map(math.prod, shapes))
    # As rows of one number: torch.cat cuts flat tensors without elements from the graph.
    flat = torch.cat([part.reshape(-1, 1) for part in parts])
    flat = AllToAll.apply(flat, AllToAllPlan(comm, sent, received))
    blocks = zip(flat.split(received), shapes, strict=True)
    return torch.cat([block.view(shape) for block, shape in blocks], now.dim)


def all_gather(
    x: Tensor, dim: int = 0, sizes: Sequence[int] | None = None, *, comm: Communicator
) -> Tensor:
    """Return the blocks of all ranks joined along `dim`; gradients are summed over ranks.

    Collective over `comm`. S -> I: each rank uses the result for its own share of the work. Blocks
    may differ along `dim` or be empty; without `sizes` one small exchange learns them.
    """
    plan = block_plan(x, dim, sizes, comm, "all_gather")
    return identity(x) if comm.size == 1 else AllGatherMap.apply(x, plan)


def reduce_scatter(
    x: Tensor, dim: int = 0, sizes: Sequence[int] | None = None, *, comm: Communicator
) -> Tensor:
    """Return this rank's block along `dim` of the sum over ranks; gradients are gathered.

    Collective over `comm`. I -> S. `x` has the same shape everywhere; blocks are balanced, or as
    `sizes` says.
    """
    plan = whole_plan(x, dim, sizes, comm, "reduce_scatter")
    return identity(x) if comm.size == 1 else ReduceScatterMap.apply(x, plan)


def concat_replicated(
    x: Tensor, dim: int = 0, sizes: Sequence[int] | None = None, *, comm: Communicator
) -> Tensor:
    """Return the blocks of all ranks joined along `dim`, a value all ranks then use alike.

    Collective forward; the backward takes the own block and sends nothing. Where each rank uses the
    result differently, `all_gather` is the right one: a slice would lose the others' gradients.
    """
    plan = block_plan(x, dim, sizes, comm, "concat_replicated")
    return identity(x) if comm.size == 1 else ConcatReplicated.apply(x, plan)


def slice_replicated(
    x: Tensor, dim: int = 0, sizes: Sequence[int] | None = None, *, comm: Communicator
) -> Tensor:
    """Return this rank's block along `dim` of `x`, which all ranks hold equal.

    Local forward; the backward gathers the blocks' gradients (collective). Blocks are balanced, or
    as `sizes` says.
    """
    plan = whole_plan(x, dim, sizes, comm, "slice_replicated")
    return identity(x) if comm.size == 1 else SliceReplicated.apply(x, plan)


def scatter(
    x: Tensor | None,
    src: int = 0,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    *,
    comm: Communicator,
) -> Tensor:
    """Return this rank's block along `dim` of the tensor of rank `src`; gradients go back.

    Collective over `comm`, and so is the backward: every rank must use its block. Only `src` needs
    a tensor, `dim` and `sizes` (balanced when None).
    """
    check_comm(comm, "scatter")
    src = check_rank(src, comm.size, "src", "scatter")
    refused: UnisonoError | None = None
    plan: BlockPlan | None = None
    if comm.rank == src and x is not None:
        try:
            plan = whole_plan(x, dim, sizes, comm, "scatter")
        except UnisonoError as error:
            refused = error
    if comm.size == 1 and plan is not None and x is not None:
        return identity(x)
    numbers = [0] * (comm.size + 1) if plan is None else [plan.dim, *plan.sizes]
    shape, dtype, needs_grad, (dim, *blocks) = announce(x, src, numbers, comm, "scatter", refused)
    block = (*shape[:dim], blocks[comm.rank], *shape[dim + 1 :])
    whole = x if comm.rank == src and x is not None else anchor(dtype, needs_grad, comm, x)
    return Scatter.apply(whole, BlockPlan(comm, dim, tuple(blocks), src, block, dtype))


def gather(
    x: Tensor, dst: int = 0, dim: int = 0, sizes: Sequence[int] | None = None, *, comm: Communicator
) -> Tensor:
    """Return all blocks joined along `dim` on rank `dst`, a tensor without elements elsewhere.

    Collective over `comm`; the backward scatters the root's gradient, so every rank must use its
    result (the empty one too: `attach` does that).
    """
    check_comm(comm, "gather")
    dst = check_rank(dst, comm.size, "dst", "gather")
    plan = block_plan(x, dim, sizes, comm, "gather")
    if comm.size == 1:
        return identity(x)
    return Gather.apply(x, replace(plan, root=dst, shape=tuple(x.shape), dtype=x.dtype))
