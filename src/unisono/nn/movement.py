"""The layers that only move data: between partitions, over axes, between layouts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from unisono.comm import Communicator
from unisono.errors import PartitionError
from unisono.nn.axes import chosen_axis, one_axis, reduced_axes
from unisono.nn.planned import PlannedModule
from unisono.nn.riding import carries_word, summed_with_word
from unisono.nn.structure import Table
from unisono.operators import AllGather as GatherMap
from unisono.operators import AllSumReduce as SumMap
from unisono.operators import ReduceScatter as ScatterMap
from unisono.operators import all_sum_reduce
from unisono.operators.gather import BlockPlan
from unisono.operators.linear import identity
from unisono.operators.partitioned import FanPlan, collect, fan_plan, spread
from unisono.operators.plans import GroupPlan
from unisono.topology import Partition
from unisono.topology.decompose import split_sizes
from unisono.topology.fanout import Group, broadcast_groups, reduce_groups

__all__ = [
    "AllGather",
    "AllSumReduce",
    "Broadcast",
    "ReduceScatter",
    "SumReduce",
]


class _Between(PlannedModule[FanPlan]):
    """What `Broadcast` and `SumReduce` share: who talks to whom between two partitions."""

    def __init__(
        self,
        P_x: Partition,
        P_y: Partition,
        transpose_src: bool = False,
        transpose_dest: bool = False,
        preserve_batch: bool = True,
    ) -> None:
        super().__init__()
        self.P_x = P_x
        self.P_y = P_y
        self.transpose_src = transpose_src
        self.transpose_dest = transpose_dest
        self.preserve_batch = preserve_batch
        self._groups()  # shapes that do not fit are refused here

    def _groups(self) -> list[Group]:
        raise TypeError("made by its subclasses")

    def _describe(self) -> tuple[object, ...]:
        flags = (self.transpose_src, self.transpose_dest, self.preserve_batch)
        return (self.P_x, self.P_y, *flags)

    def _plan_of(self, table: Table, shapes: list[tuple[int, ...]]) -> FanPlan:
        mine = table.of(self.P_x.root.rank).shape
        batch = mine[:1] if self.preserve_batch and mine else ()
        return fan_plan(
            self._groups(),
            self.P_x.root,
            shapes,
            table.dtype(self.P_x),
            empty=(*batch, 0),
        )


class Broadcast(_Between):
    """Give each rank of `P_y` the block of `P_x` that belongs to its place; gradients are summed.

    Args:
        P_x: partition of the input.
        P_y: partition of the output; dims where `P_x` has one rank are spread over it.
        transpose_src: read indices in `P_x` backwards; likewise `transpose_dest`.
        preserve_batch: a rank outside of `P_y` gets shape `(B, 0)` with the batch size of its
            input, instead of `(0,)`.
    """

    def _groups(self) -> list[Group]:
        return broadcast_groups(self.P_x, self.P_y, self.transpose_src, self.transpose_dest)

    def _make_plan(self, tables: Sequence[Table]) -> FanPlan:
        (table,) = tables
        return self._plan_of(table, [table.of(group.root).shape for group in self._groups()])

    def forward(self, input: Tensor) -> Tensor:
        """Return this rank's block on `P_y`."""
        if not self._takes_part:
            return self._outside(input, preserve_batch=self.preserve_batch)
        return spread(self._tied(input), self._plan)


class SumReduce(_Between):
    """Sum on each rank of `P_y` the blocks of `P_x` that belong to its place; the adjoint of
    `Broadcast`. Arguments as there.
    """

    def _groups(self) -> list[Group]:
        return reduce_groups(self.P_x, self.P_y, self.transpose_src, self.transpose_dest)

    def _make_plan(self, tables: Sequence[Table]) -> FanPlan:
        (table,) = tables
        shapes: list[tuple[int, ...]] = []
        for group in self._groups():
            found = {rank: table.of(rank).shape for rank in group.peers}
            first = found[group.peers[0]]
            if any(shape != first for shape in found.values()):
                raise PartitionError.because(
                    f"sum of blocks on rank {group.root}",
                    "\n".join(f"rank {rank}: {list(shape)}" for rank, shape in found.items()),
                    "their shapes differ",
                    "blocks that are summed must be equal in shape",
                )
            shapes.append(first)
        return self._plan_of(table, shapes)

    def forward(self, input: Tensor) -> Tensor:
        """Return this rank's sum on `P_y`."""
        if not self._takes_part:
            return self._outside(input, preserve_batch=self.preserve_batch)
        return collect(self._tied(input), self._plan)


class AllSumReduce(PlannedModule[Communicator]):
    """Sum over the ranks that share the index outside `axes_reduce`; gradients likewise.

    Args:
        P_x: partition of the input.
        axes_reduce: axes of the partition to sum over, or
        axes_keep: those not to sum over. Exactly one of the two.
    """

    _word_travels = "inside"

    def __init__(
        self,
        P_x: Partition,
        axes_reduce: int | Sequence[int] | None = None,
        axes_keep: int | Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.P_x = P_x
        self.axes = reduced_axes(P_x, axes_reduce, axes_keep, "axes_reduce")

    def _describe(self) -> tuple[object, ...]:
        return (self.P_x, self.axes)

    def _make_plan(self, tables: Sequence[Table]) -> Communicator:
        (table,) = tables
        table.dtype(self.P_x)
        for place in range(self.P_x.size):
            group = self.P_x.sub(self.axes, rank=place)
            found = {rank: table.of(rank).shape for rank in group.ranks}
            if len(set(found.values())) > 1:
                raise PartitionError.because(
                    f"AllSumReduce over axes {list(self.axes)} of {self.P_x!r}",
                    "\n".join(f"rank {rank}: {list(shape)}" for rank, shape in found.items()),
                    "their shapes differ",
                    "blocks that are summed must be equal in shape",
                )
        return self.P_x.sub(self.axes).comm

    def forward(self, input: Tensor) -> Tensor:
        """Return the sum, on every rank of the group."""
        if not self._takes_part:
            return self._outside(input)
        comm = self._plan
        if comm.size < self.P_x.size or not carries_word(self._structures[0].dtype, comm.size):
            self._answer_first((input,))  # the sum does not reach all ranks, or cannot count them
        question = self._take_question()
        if question is None:
            return all_sum_reduce(self._tied(input), comm=self._plan)
        given = self._nothing() if question.stands_in else input.detach()
        total, heard = summed_with_word(given, comm, question.word)
        if self._heeded(question.settle(heard), (input,)):
            return all_sum_reduce(self._tied(input), comm=self._plan)
        return SumMap.apply(self._tied(input), GroupPlan(comm, landed=total))


class AllGather(PlannedModule[BlockPlan]):
    """Join the blocks along one axis, on every rank; gradients are summed, each rank keeps its own.

    Args:
        P_x: partition of the input.
        axes_all_gather: the axis, which is also the tensor dim; or
        axes_keep: all other axes. Exactly one of the two.
        scale_backward: axis, or slice of axes: the gradient is divided by their number of ranks.
    """

    def __init__(
        self,
        P_x: Partition,
        axes_all_gather: int | Sequence[int] | None = None,
        axes_keep: int | Sequence[int] | None = None,
        scale_backward: int | slice | None = None,
    ) -> None:
        super().__init__()
        self.P_x = P_x
        self.axis = one_axis(P_x, axes_all_gather, axes_keep, "axes_all_gather")
        if scale_backward is not None and not isinstance(scale_backward, slice):
            scale_backward = chosen_axis(P_x, scale_backward, "scale_backward")
        self.scale_backward = scale_backward

    def _describe(self) -> tuple[object, ...]:
        return (self.P_x, self.axis, self.scale_backward)

    def _make_plan(self, tables: Sequence[Table]) -> BlockPlan:
        (table,) = tables
        table.dtype(self.P_x)
        cuts = table.cuts(self.P_x)[self.axis]
        sizes = tuple(b - a for a, b in pairwise(cuts))
        return BlockPlan(self.P_x.sub(self.axis).comm, self.axis, sizes)

    def forward(self, input: Tensor) -> Tensor:
        """Return the joined tensor."""
        if not self._takes_part:
            return self._outside(input)
        y = (
            GatherMap.apply(self._tied(input), self._plan)
            if self._plan.comm.size > 1
            else identity(input)
        )
        workers = _workers(self.P_x, self.scale_backward)
        return y if workers == 1 else _ScaleGradient.apply(y, workers)


class ReduceScatter(PlannedModule[BlockPlan]):
    """Sum over one axis and keep the balanced block; gradients are joined.

    Args:
        P_x: partition of the input, whole in the dim of the axis.
        axes_reduce_scatter: the axis, which is also the tensor dim; or
        axes_keep: all other axes. Exactly one of the two.
    """

    def __init__(
        self,
        P_x: Partition,
        axes_reduce_scatter: int | Sequence[int] | None = None,
        axes_keep: int | Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.P_x = P_x
        self.axis = one_axis(P_x, axes_reduce_scatter, axes_keep, "axes_reduce_scatter")

    def _describe(self) -> tuple[object, ...]:
        return (self.P_x, self.axis)

    def _make_plan(self, tables: Sequence[Table]) -> BlockPlan:
        (table,) = tables
        table.dtype(self.P_x)
        for place in range(self.P_x.size):
            group = self.P_x.sub(self.axis, rank=place)
            found = {rank: table.of(rank).shape for rank in group.ranks}
            if len(set(found.values())) > 1:
                raise PartitionError.because(
                    f"ReduceScatter over axis {self.axis} of {self.P_x!r}",
                    "\n".join(f"rank {rank}: {list(shape)}" for rank, shape in found.items()),
                    "their shapes differ",
                    "each rank of the axis brings the whole tensor",
                )
            lacking = next((rank for rank in group.ranks if len(found[rank]) <= self.axis), None)
            if lacking is not None:
                dims = len(found[lacking])
                raise PartitionError.because(
                    f"ReduceScatter over axis {self.axis} of {self.P_x!r}",
                    f"rank {lacking}: {list(found[lacking])}",
                    f"no dim {self.axis} in a tensor of {dims} dims: {self.axis} >= {dims}",
                    f"a tensor of {self.P_x.dim} dims",
                )
        whole = table.of(self.P_x.root.rank).shape
        comm = self.P_x.sub(self.axis).comm
        return BlockPlan(comm, self.axis, split_sizes(whole[self.axis], comm.size))

    def forward(self, input: Tensor) -> Tensor:
        """Return this rank's block of the sum."""
        if not self._takes_part:
            return self._outside(input)
        if self._plan.comm.size == 1:
            return identity(input)
        return ScatterMap.apply(self._tied(input), self._plan)


class _ScaleGradient(torch.autograd.Function):
    """The identity, with its gradient divided."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, workers: int) -> Tensor:
        ctx.workers = workers
        return identity(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad / ctx.workers, None


def _workers(partition: Partition, axes: int | slice | None) -> int:
    if axes is None:
        return 1
    chosen = partition.shape[axes] if isinstance(axes, slice) else (partition.shape[axes],)
    return prod(chosen)
