"""The operators between partitions: who talks to whom follows from the grids of ranks.

Plain linear maps on the direct sum of the ranks' blocks: `broadcast`, `sum_reduce`,
`all_sum_reduce`, `all_gather`, `reduce_scatter`. For values that every rank holds equal and whose
backward every rank seeds alike: `replicate`, `sum_to_replicated`, `gather_to_replicated`, `split`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from unisono.comm import Communicator
from unisono.comm.arguments import pack_shape, unpack_shape
from unisono.errors import PartitionError
from unisono.operators import reduce as sums
from unisono.operators.gather import all_gather as join_blocks
from unisono.operators.gather import concat_replicated, slice_replicated
from unisono.operators.gather import reduce_scatter as sum_blocks
from unisono.operators.linear import identity
from unisono.operators.reduce import BroadcastMap, Fan, FanPlan, SumReduceMap
from unisono.topology import Partition
from unisono.topology.fanout import Group, broadcast_groups, reduce_groups


def fan_plan(
    groups: Sequence[Group],
    root: Communicator,
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    *,
    empty: tuple[int, ...] = (0,),
) -> FanPlan:
    """Return this rank's plan; makes the communicators it needs, in the order of all ranks.

    Args:
        groups: of `topology.broadcast_groups` or `reduce_groups`.
        root: communicator whose ranks the groups name.
        shapes: shape of the block of each group.
        dtype: of the data.
        empty: shape of the result on a rank that gets none.
    """
    me = root.rank
    fans: list[Fan] = []
    for group, shape in sorted(
        zip(groups, shapes, strict=True), key=lambda pair: tuple(sorted(pair[0].members))
    ):
        members = tuple(sorted(group.members))
        if me not in members:
            continue
        comm = root.sub(members)
        if comm is None:
            raise PartitionError(f"rank {me} got no communicator of ranks {members}")
        is_root, is_peer = me == group.root, me in group.peers
        fans.append(Fan(comm, members.index(group.root), shape, is_root, is_peer))
    return FanPlan(tuple(fans), dtype, empty)


def spread(x: Tensor, plan: FanPlan) -> Tensor:
    """Return the block that this rank's root holds. Collective over the fans of the plan."""
    return identity(x) if plan.is_identity else BroadcastMap.apply(*_fitted(x, plan))


def collect(x: Tensor, plan: FanPlan) -> Tensor:
    """Return on a root the sum of its peers' blocks. Collective over the fans of the plan."""
    return identity(x) if plan.is_identity else SumReduceMap.apply(*_fitted(x, plan))


def broadcast(
    x: Tensor,
    src: Partition,
    dest: Partition,
    *,
    transpose_src: bool = False,
    transpose_dest: bool = False,
) -> Tensor:
    """Return the block of `src` that belongs to this rank's place in `dest`; gradients are summed.

    Called by all ranks of both partitions. Dims where `src` has one rank are spread over `dest`'s.

    Args:
        x: own block on a rank of `src`, a tensor without elements elsewhere.
        src: partition that holds the blocks.
        dest: partition that gets them; a rank outside gets a tensor of shape `[0]`.
        transpose_src: read the index in `src` backwards; likewise `transpose_dest`. Tensors are
            never transposed, only who talks to whom.
    """
    groups = broadcast_groups(src, dest, transpose_src, transpose_dest)
    shapes, dtype = _announced(x, src, dest)
    by_root = dict(zip(src.ranks, shapes, strict=True))
    each = [by_root[group.root] for group in groups]
    return spread(x, fan_plan(groups, src.root, each, dtype))


def sum_reduce(
    x: Tensor,
    src: Partition,
    dest: Partition,
    *,
    transpose_src: bool = False,
    transpose_dest: bool = False,
) -> Tensor:
    """Return on each rank of `dest` the sum of the blocks of `src` that belong to its place.

    The adjoint of `broadcast` from `dest` to `src`; called as it is.
    """
    groups = reduce_groups(src, dest, transpose_src, transpose_dest)
    shapes, dtype = _announced(x, src, dest)
    by_rank = dict(zip(src.ranks, shapes, strict=True))
    each = [_same_shape(group, by_rank) for group in groups]
    return collect(x, fan_plan(groups, src.root, each, dtype))


def all_sum_reduce(x: Tensor, partition: Partition, axes: int | Sequence[int]) -> Tensor:
    """Return the sum over the ranks that share this rank's index outside `axes`.

    Its own adjoint. A rank outside of the partition gets its tensor back.
    """
    return _along(sums.all_sum_reduce, x, partition, axes)


def replicate(x: Tensor, partition: Partition, axes: int | Sequence[int]) -> Tensor:
    """Return `x`, which all ranks along `axes` hold equal; its gradient is summed over them."""
    return _along(sums.copy, x, partition, axes)


def sum_to_replicated(x: Tensor, partition: Partition, axes: int | Sequence[int]) -> Tensor:
    """Return the sum over `axes`, a value that counts once: its gradient passes unchanged."""
    return _along(sums.sum_to_replicated, x, partition, axes)


def all_gather(x: Tensor, partition: Partition, axis: int, dim: int | None = None) -> Tensor:
    """Return the blocks along one axis of the partition joined in tensor dim `dim` (the axis's)."""
    return _along(join_blocks, x, partition, axis, axis if dim is None else dim)


def reduce_scatter(x: Tensor, partition: Partition, axis: int, dim: int | None = None) -> Tensor:
    """Return the balanced block in tensor dim `dim` of the sum over one axis of the partition."""
    return _along(sum_blocks, x, partition, axis, axis if dim is None else dim)


def gather_to_replicated(
    x: Tensor, partition: Partition, axis: int, dim: int | None = None
) -> Tensor:
    """Return the joined blocks as a value that counts once: each rank keeps its own gradient."""
    return _along(concat_replicated, x, partition, axis, axis if dim is None else dim)


def split(x: Tensor, partition: Partition, axis: int, dim: int | None = None) -> Tensor:
    """Return this rank's balanced block of a replicated value; the gradients are joined."""
    return _along(slice_replicated, x, partition, axis, axis if dim is None else dim)


def _along(
    operator: Callable[..., Tensor],
    x: Tensor,
    partition: Partition,
    axes: int | Sequence[int],
    *dim: int,
) -> Tensor:
    """Apply an operator on the ranks along axes of a partition; outside of it, nothing happens."""
    return operator(x, *dim, comm=partition.sub(axes).comm) if partition.active else identity(x)


def _fitted(x: Tensor, plan: FanPlan) -> tuple[Tensor, FanPlan]:
    """Return an input without elements in the dtype of the data, and a plan that gives it back."""
    typed = x.to(plan.dtype) if x.dtype != plan.dtype and x.numel() == 0 else x
    return typed, plan.for_empty(tuple(x.shape))


def _announced(
    x: Tensor, src: Partition, dest: Partition
) -> tuple[list[tuple[int, ...]], torch.dtype]:
    """Tell all ranks of both partitions the shapes and the dtype of the blocks of `src`."""
    src.check_same_root(dest)
    union = tuple(sorted({*src.ranks, *dest.ranks}))
    comm = src.root.sub(union)
    if comm is None:
        return [(0,)] * src.size, x.dtype
    records = comm.all_gather_ints(pack_shape(x.shape, x.dtype))
    blocks = [unpack_shape(records[union.index(rank)]) for rank in src.ranks]
    kinds = {dtype for _, dtype in blocks}
    if len(kinds) > 1:
        raise PartitionError.because(
            f"blocks of {src!r}", f"different dtypes: {', '.join(sorted(map(str, kinds)))}"
        )
    return [shape for shape, _ in blocks], blocks[0][1]


def _same_shape(group: Group, shapes: dict[int, tuple[int, ...]]) -> tuple[int, ...]:
    by_rank = {rank: shapes[rank] for rank in group.peers}
    first = next(iter(by_rank.values()))
    if any(shape != first for shape in by_rank.values()):
        raise PartitionError.because(
            f"sum of blocks on rank {group.root}",
            "\n".join(f"rank {rank}: {list(shape)}" for rank, shape in by_rank.items()),
            hint="blocks that are summed must have equal shapes",
        )
    return first
