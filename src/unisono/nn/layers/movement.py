"""The layers that only move data: between partitions, over axes, between layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from unisono.comm import Communicator
from unisono.errors import PartitionError
from unisono.expect import expect_int
from unisono.nn.agreement import Table
from unisono.nn.planned import PlannedModule, ScaledGradient
from unisono.operators import AllGatherMap, ReduceScatterMap, RepartitionMap, all_sum_reduce
from unisono.operators.gather import BlockPlan
from unisono.operators.linear import LinearMap, identity
from unisono.operators.partitioned import FanPlan, collect, fan_plan, spread
from unisono.operators.repartition import RepartitionOnGroup
from unisono.topology import Partition
from unisono.topology.decompose import split_sizes
from unisono.topology.fanout import Group, broadcast_groups, reduce_groups
from unisono.topology.overlap import repartition_plan
from unisono.topology.window import as_int

_SUMMED = "blocks that are summed must be equal in shape"


class Broadcast(PlannedModule):
    """Give each rank of `P_y` the block of `P_x` that belongs to its place; gradients are summed.

    Args:
        P_x: partition of the input.
        P_y: partition of the output; dims where `P_x` has one rank are spread over it.
        transpose_src: read indices in `P_x` backwards; likewise `transpose_dest`.
        preserve_batch: a rank outside of `P_y` gets shape `(B, 0)` with the batch size of its
            input, instead of `(0,)`.
    """

    _plan: FanPlan

    _groups_of = staticmethod(broadcast_groups)
    _carry_out = staticmethod(spread)

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
        # Shapes that do not fit are refused here.
        self._groups = self._groups_of(P_x, P_y, transpose_src, transpose_dest)

    def _make_plan(self, tables: Sequence[Table]) -> FanPlan:
        (table,) = tables
        root = self.P_x.root
        block_shape = table.of(root.rank).shape
        batch = block_shape[:1] if self.preserve_batch and block_shape else ()
        shapes = [self._shape_in(table, group) for group in self._groups]
        return fan_plan(self._groups, root, shapes, table.dtype(self.P_x), empty=(*batch, 0))

    def _shape_in(self, table: Table, group: Group) -> tuple[int, ...]:
        return table.of(group.root).shape

    def forward(self, input: Tensor) -> Tensor:
        """Return this rank's block, or sum, on `P_y`."""
        if not self._takes_part:
            return self._outside(input, preserve_batch=self.preserve_batch)
        return self._carry_out(self._tied(input), self._plan)


class SumReduce(Broadcast):
    """Sum on each rank of `P_y` the blocks of `P_x` that belong to its place; the adjoint of
    `Broadcast`. Arguments as there.
    """

    _takes_blocks = False

    _groups_of = staticmethod(reduce_groups)
    _carry_out = staticmethod(collect)

    def _shape_in(self, table: Table, group: Group) -> tuple[int, ...]:
        return table.one_shape(group.peers, f"sum of blocks on rank {group.root}", _SUMMED)


class AllSumReduce(PlannedModule):
    """Sum over the ranks that share the index outside `axes_reduce`; gradients likewise.

    Args:
        P_x: partition of the input.
        axes_reduce: axes of the partition to sum over, or
        axes_keep: those not to sum over. Exactly one of the two.
    """

    _plan: Communicator

    _takes_blocks = False

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
        action = f"AllSumReduce over axes {list(self.axes)} of {self.P_x!r}"
        for place in range(self.P_x.size):
            table.one_shape(self.P_x.sub(self.axes, rank=place).ranks, action, _SUMMED)
        return self.P_x.sub(self.axes).comm

    def forward(self, input: Tensor) -> Tensor:
        """Return the sum, on every rank of the group."""
        if not self._takes_part:
            return self._outside(input)
        return all_sum_reduce(self._tied(input), comm=self._plan)


class _AlongAxis(PlannedModule):
    """A movement of blocks along one axis, which is also the tensor dim."""

    _plan: BlockPlan

    P_x: Partition
    axis: int
    _map: ClassVar[type[LinearMap]]

    def _describe(self) -> tuple[object, ...]:
        return (*super()._describe(), self.axis)

    def forward(self, input: Tensor) -> Tensor:
        """Return what the movement gives this rank."""
        if not self._takes_part:
            return self._outside(input)
        if self._plan.comm.size == 1:
            return identity(input)
        return self._map.apply(self._tied(input), self._plan)


class AllGather(_AlongAxis):
    """Join the blocks along one axis, on every rank; gradients are summed, each rank keeps its own.

    Args:
        P_x: partition of the input.
        axes_all_gather: the axis, which is also the tensor dim; or
        axes_keep: all other axes. Exactly one of the two.
        scale_backward: axis, or slice of axes: the gradient is divided by their number of ranks.
    """

    _map = AllGatherMap

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
            scale_backward = _as_axes(P_x, scale_backward, "scale_backward")[0]
        self.scale_backward = scale_backward

    def _make_plan(self, tables: Sequence[Table]) -> BlockPlan:
        (table,) = tables
        table.dtype(self.P_x)
        cuts = table.cuts(self.P_x)[self.axis]
        sizes = tuple(b - a for a, b in pairwise(cuts))
        return BlockPlan(self.P_x.sub(self.axis).comm, self.axis, sizes)

    def forward(self, input: Tensor) -> Tensor:
        """Return the joined tensor."""
        y, axes = super().forward(input), self.scale_backward
        if axes is None or not self._takes_part:
            return y
        chosen = self.P_x.shape[axes] if isinstance(axes, slice) else (self.P_x.shape[axes],)
        return ScaledGradient.apply(y, 1 / prod(chosen))


class ReduceScatter(_AlongAxis):
    """Sum over one axis and keep the balanced block; gradients are joined.

    Args:
        P_x: partition of the input, whole in the dim of the axis.
        axes_reduce_scatter: the axis, which is also the tensor dim; or
        axes_keep: all other axes. Exactly one of the two.
    """

    _takes_blocks = False

    _map = ReduceScatterMap

    def __init__(
        self,
        P_x: Partition,
        axes_reduce_scatter: int | Sequence[int] | None = None,
        axes_keep: int | Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.P_x = P_x
        self.axis = one_axis(P_x, axes_reduce_scatter, axes_keep, "axes_reduce_scatter")

    def _make_plan(self, tables: Sequence[Table]) -> BlockPlan:
        (table,) = tables
        table.dtype(self.P_x)
        action = f"ReduceScatter over axis {self.axis} of {self.P_x!r}"
        for place in range(self.P_x.size):
            ranks = self.P_x.sub(self.axis, rank=place).ranks
            shape = table.one_shape(ranks, action, "each rank of the axis brings the whole tensor")
            if len(shape) <= self.axis:
                dims = len(shape)
                raise PartitionError.because(
                    action,
                    f"rank {ranks[0]}: {list(shape)}",
                    f"no dim {self.axis} in a tensor of {dims} dims: {self.axis} >= {dims}",
                    f"a tensor of {self.P_x.dim} dims",
                )
        whole = table.of(self.P_x.root.rank).shape
        comm = self.P_x.sub(self.axis).comm
        return BlockPlan(comm, self.axis, split_sizes(whole[self.axis], comm.size))


@dataclass(frozen=True)
class _Moved(RepartitionOnGroup):
    dtype: torch.dtype = torch.float32
    """Of the data, which a rank without a block may not know."""


class Repartition(PlannedModule):
    """Move a tensor from the blocks of one partition to the balanced blocks of another.

    Args:
        P_x: partition of the input; blocks may be of any size.
        P_y: partition of the output, with as many dims.
        preserve_batch: a rank outside of `P_y` gets shape `(B, 0)` instead of `(0,)`.
    """

    _plan: _Moved

    def __init__(self, P_x: Partition, P_y: Partition, preserve_batch: bool = True) -> None:
        super().__init__()
        if P_x.dim != P_y.dim:
            raise PartitionError.because(
                f"Repartition from {P_x!r} to {P_y!r}",
                f"{P_x.dim} and {P_y.dim} dims",
                f"{P_x.dim} != {P_y.dim}",
                "partitions of equal length; write 1 where a dim is not split",
            )
        P_x.check_same_root(P_y)
        self.P_x = P_x
        self.P_y = P_y
        self.preserve_batch = preserve_batch

    def _make_plan(self, tables: Sequence[Table]) -> _Moved:
        (table,) = tables
        cuts = table.cuts(self.P_x)
        dtype = table.dtype(self.P_x)
        root = self.P_x.root
        P_x, P_y, before = self.P_x, self.P_y, table.of(root.rank).shape
        overlap = repartition_plan(cuts, P_x.ranks, P_y.shape, P_y.ranks, root.rank)
        after = overlap.dest_shape
        if after is None:
            after = (*before[:1], 0) if self.preserve_batch else (0,)
        return _Moved(root, overlap, before, after, dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Return this rank's block on `P_y`."""
        if not self._takes_part:
            return self._outside(input, preserve_batch=self.preserve_batch)
        plan = self._plan
        if plan.overlap.is_identity and input.dtype == plan.dtype:
            return identity(input)
        return RepartitionMap.apply(self._tied(input.to(plan.dtype)), plan)


DistributedTranspose = Repartition


def reduced_axes(
    partition: Partition,
    axes: int | Sequence[int] | None,
    keep: int | Sequence[int] | None,
    name: str,
) -> tuple[int, ...]:
    """Return the axes meant by exactly one of `axes` and `keep`, ascending."""
    if (axes is None) == (keep is None):
        number = "both" if axes is not None else "neither"
        raise PartitionError.because(
            f"{name} and axes_keep on {partition!r}",
            f"{number} given ({name}={axes}, axes_keep={keep})",
            None,
            f"give one of them, e.g. {name}=(0,)",
        )
    named = cast("int | Sequence[int]", axes if axes is not None else keep)
    chosen = _as_axes(partition, named, name)
    if axes is not None:
        return chosen
    return tuple(axis for axis in range(partition.dim) if axis not in chosen)


def one_axis(
    partition: Partition,
    axes: int | Sequence[int] | None,
    keep: int | Sequence[int] | None,
    name: str,
) -> int:
    """Return the single axis meant by exactly one of `axes` and `keep`."""
    chosen = reduced_axes(partition, axes, keep, name)
    if len(chosen) != 1:
        raise PartitionError.because(
            f"{name} on {partition!r}",
            f"axes {list(chosen)}",
            f"{len(chosen)} != 1",
            f"one axis, e.g. {name}=0",
        )
    return chosen[0]


def _as_axes(partition: Partition, axes: int | Sequence[int], name: str) -> tuple[int, ...]:
    """Return axes of a partition, counted from its front, ascending."""
    dims = partition.dim
    several = isinstance(axes, Sequence) and as_int(axes) is None
    listed: Any = axes if several else [axes]
    ints = [axis if (one := as_int(axis)) is None else one for axis in listed]
    return tuple(
        sorted({expect_int(name, axis, -dims, dims, error=PartitionError) % dims for axis in ints})
    )
