"""Linear layers split over ranks: a grid of weight blocks, or one axis of ranks.

`DistributedLinear` has input, weight and output on three partitions. `DistributedLinearAllGather`
(column-parallel) and `DistributedLinearReduceScatter` (row-parallel) are the halves of a wide MLP.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unisono.comm import Communicator
from unisono.comm.perform import Pending
from unisono.errors import PartitionError
from unisono.expect import expect_int
from unisono.nn.agreement import Cuts, Table
from unisono.nn.parameters import (
    Holding,
    WeightGrid,
    Weights,
    check_weights,
    held_by,
    nothing,
    part,
)
from unisono.nn.planned import balanced_in, check_sizes, collect_products, recut
from unisono.nn.precision import is_plain
from unisono.nn.state import HoldingModule
from unisono.operators import AllGatherMap, ReduceScatterMap
from unisono.operators.gather import BlockPlan
from unisono.operators.linear import slopes
from unisono.operators.partitioned import FanPlan, spread
from unisono.topology import Partition
from unisono.topology.decompose import block, split_sizes
from unisono.topology.halo import HaloPlan


@dataclass(frozen=True)
class SubLinear:
    """The local part of a distributed linear layer."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class _GridPlan:
    halo: HaloPlan | None
    """Moves features to balanced blocks, where the input's are not; on a rank of `P_x`."""
    to_weights: FanPlan
    to_outputs: FanPlan


class DistributedLinear(HoldingModule[_GridPlan]):
    """`torch.nn.Linear` with input, weight and output split over three partitions.

    Args:
        P_x: partition of the input `[*, in_features]`; its last dim splits the features.
        P_y: partition of the output, the same but for its last dim.
        P_w: partition of the weight, `[out, in]` blocks; with a leading batch dim if `P_x` has one.
        in_features: of the whole layer; likewise `out_features`.
        bias: held where the input features begin.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        P_x: Partition,
        P_y: Partition,
        P_w: Partition,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        weights: Weights = "replicated",
    ) -> None:
        super().__init__()
        in_features, out_features = _check_features(in_features, out_features)
        self.P_x, self.P_y, self.P_w = P_x, P_y, P_w
        self.in_features, self.out_features = in_features, out_features
        self.weights: Weights = check_weights(weights)
        self.use_bias = bias
        self._grid = WeightGrid("DistributedLinear", P_x, P_y, P_w, P_x.dim - 1)
        shape = (out_features, in_features)
        stored, stored_bias = nothing(shape), nothing(shape[:1])
        self._shape: tuple[int, ...] | None = None
        """Of the weight block that this rank multiplies with; None outside of the grid."""
        self._adds_bias = False
        index = self._grid.index
        if index is not None:
            outs, ins = self._blocks(index)
            used = part(shape, {0: outs, 1: ins})
            self._shape = used.shape
            self._adds_bias = index[2] == 0
            if weights == "replicated" or index[0] == 0:
                stored = used
                if self._adds_bias:
                    stored_bias = part(shape[:1], {0: outs})
        self._draw(stored, stored_bias if bias else None, dtype=dtype, device=device)

    @property
    def sublinear(self) -> SubLinear:
        """The local weight block and bias."""
        return SubLinear(self.weight, self.bias)

    def _blocks(self, index: Sequence[int]) -> tuple[tuple[int, int], tuple[int, int]]:
        _, outs, ins = self._grid.ranks.shape
        return block(self.out_features, outs, index[1]), block(self.in_features, ins, index[2])

    def _make_plan(self, tables: Sequence[Table]) -> _GridPlan:
        (table,) = tables
        dtype = table.dtype(self.P_x)
        cuts = table.cuts(self.P_x)
        check_sizes("DistributedLinear", [self.in_features], [-1], [cut[-1] for cut in cuts])
        shapes = {
            rank: _balanced_shape(cuts, self.P_x, place)
            for place, rank in enumerate(self.P_x.ranks)
        }
        grid, partials = self._grid, dict[int, tuple[int, ...]]()
        for place, rank in enumerate(grid.ranks.ranks):
            at = grid.ranks.index_of(place)
            (c0, c1), _ = self._blocks(at)
            partials[rank] = (*shapes[grid.source(at)][:-1], c1 - c0)
        index = self.P_x.index
        return _GridPlan(
            None if index is None else recut(cuts, balanced_in(cuts, -1), index),
            grid.to_weights(shapes, dtype),
            grid.to_outputs(partials, dtype, table.of(self.P_x.root.rank).shape),
        )

    def _users(self, name: str) -> Partition | None:  # noqa: ARG002
        return self._grid.users

    def forward(self, input: Tensor) -> Tensor:
        """Return this rank's block of the output on `P_y`."""
        if not self._takes_part:
            return self._outside(input)
        window = spread(self._window(input), self._plan.to_weights)
        if self._shape is not None:
            names = ("weight", "bias") if self._adds_bias else ("weight",)
            window = F.linear(window, *self._used(names, (self._shape, self._shape[:1])))
        return collect_products(window, self._plan.to_outputs)


def _balanced_shape(cuts: Cuts, P_x: Partition, place: int) -> tuple[int, ...]:
    """Return the shape of a block of `P_x` whose features are balanced."""
    index = P_x.index_of(place)
    lead = [bounds[i + 1] - bounds[i] for bounds, i in zip(cuts[:-1], index[:-1], strict=True)]
    start, stop = block(cuts[-1][-1], P_x.shape[-1], index[-1])
    return (*lead, stop - start)


@dataclass(frozen=True)
class _AxisPlan(BlockPlan):
    halo: HaloPlan | None = None
    """Moves input features to balanced blocks, those of the weight; None where they are."""


class _OneAxisLinear(HoldingModule[_AxisPlan]):
    """What the column- and row-parallel layers share: one axis of ranks, blocks of one dim."""

    def __init__(
        self, P_x: Partition, P_y: Partition, split: Partition, in_features: int, out_features: int,
        weights: Weights,
    ) -> None:  # fmt: skip
        super().__init__()
        in_features, out_features = _check_features(in_features, out_features)
        self.P_x, self.P_y = P_x, P_y
        self._P = split
        """The one whose last axis splits the features."""
        other = P_x if split is P_y else P_y
        self._dim = _moved_dim(type(self).__name__, split, other)
        self.in_features, self.out_features = in_features, out_features
        self.weights: Weights = check_weights(weights)

    def _take_blocks(
        self,
        holding: Holding,
        own_bias: Holding | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        """Draw the blocks of weight and bias that this rank uses, and keep those it holds."""
        self.use_bias = own_bias is not None
        self._blocks = {"weight": holding.shape}
        holding = held_by(self._users("weight"), self.weights, holding)
        if own_bias is not None:
            self._blocks["bias"] = own_bias.shape
            own_bias = held_by(self._users("bias"), self.weights, own_bias)
        self._draw(holding, own_bias, dtype=dtype, device=device)

    def _own_share(self, count: int) -> tuple[int, int] | None:
        """Return the own range of `count` features; None on a rank outside."""
        if self._P.index is None:
            return None
        return block(count, self._P.shape[-1], self._P.index[-1])

    def _users(self, name: str) -> Partition | None:  # noqa: ARG002
        """Return the ranks that use this rank's block of a parameter: same place on the axis."""
        return self._P.sub(tuple(range(self._P.dim - 1))) if self._P.active else None

    def _axis(self) -> Communicator:
        """Return the ranks along the feature axis."""
        return self._P.sub(self._P.dim - 1).comm

    def _blocks_of(self, *names: str) -> list[Tensor]:
        """Return the blocks of parameters that the same ranks use, in one message."""
        return self._used(names, [self._blocks[name] for name in names])


class DistributedLinearAllGather(_OneAxisLinear):
    """Column-parallel linear: the input is gathered, each rank computes its output features.

    Args:
        P_y: partition of the output; its last dim splits the output features.
        in_features: of the whole layer; likewise `out_features`.
        bias: one block a rank.
        P_x: partition of the input, if its second-last dim is split instead of its features.
        weights: "replicated", or "root": of the ranks that use a block, the first alone holds it.
    """

    def __init__(
        self,
        P_y: Partition,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        P_x: Partition | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        weights: Weights = "replicated",
    ) -> None:
        outer = P_y if P_x is None else P_x
        super().__init__(outer, P_y, P_y, in_features, out_features, weights)
        shape = (out_features, in_features)
        stored, stored_bias = nothing(shape), nothing(shape[:1])
        share = self._own_share(out_features)
        if share is not None:
            stored, stored_bias = part(shape, {0: share}), part(shape[:1], {0: share})
        self._take_blocks(stored, stored_bias if bias else None, device, dtype)

    def _make_plan(self, tables: Sequence[Table]) -> _AxisPlan:
        (table,) = tables
        table.dtype(self.P_x)
        cuts = table.cuts(self.P_x)
        check_sizes(
            "DistributedLinearAllGather", [self.in_features], [-1], [cut[-1] for cut in cuts]
        )
        sizes = tuple(b - a for a, b in pairwise(cuts[self._dim]))
        return _AxisPlan(self._axis(), self._dim, sizes)

    def forward(self, input: Tensor) -> Tensor:
        """Return `[*, out_features / ranks]`."""
        if not self._takes_part:
            return self._outside(input)
        plan = self._plan
        tied = self._tied(input)
        weight, *bias = self._blocks_of(*self._blocks)
        if plan.comm.size == 1:
            return F.linear(tied, weight, *bias)
        if is_plain(input):
            return _Columns.apply(tied, weight, bias[0] if bias else None, plan)
        return F.linear(AllGatherMap.apply(tied, plan), weight, *bias)


class DistributedLinearReduceScatter(_OneAxisLinear):
    """Row-parallel linear: each rank multiplies its input features, sums are cut into blocks.

    Args:
        P_x: partition of the input; its last dim splits the input features.
        in_features: of the whole layer; likewise `out_features`.
        bias: added once, after the sum.
        P_y: partition of the output, if its second-last dim is to be split instead of its features.
        weights: "replicated", or "root": of the ranks that use a block, the first alone holds it.
    """

    def __init__(
        self,
        P_x: Partition,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        P_y: Partition | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        weights: Weights = "replicated",
    ) -> None:
        outer = P_x if P_y is None else P_y
        super().__init__(P_x, outer, P_x, in_features, out_features, weights)
        shape = (out_features, in_features)
        stored, stored_bias = nothing(shape), nothing(shape[:1])
        share, outs = self._own_share(in_features), self._own_share(out_features)
        if share is not None and outs is not None:
            stored = part(shape, {1: share})
            stored_bias = part(shape[:1], {0: outs} if self._splits_output else {})
        self._take_blocks(stored, stored_bias if bias else None, device, dtype)

    @property
    def _splits_output(self) -> bool:
        return self._dim == self.P_x.dim - 1

    def _make_plan(self, tables: Sequence[Table]) -> _AxisPlan:
        (table,) = tables
        table.dtype(self.P_x)
        cuts = table.cuts(self.P_x)
        check_sizes(
            "DistributedLinearReduceScatter", [self.in_features], [-1], [cut[-1] for cut in cuts]
        )
        balanced, index = balanced_in(cuts, -1), self.P_x.index
        comm = self._axis()
        length = self.out_features if self._splits_output else cuts[self._dim][-1]
        sizes = split_sizes(length, comm.size)
        is_balanced = balanced == tuple(map(tuple, cuts))
        balance = None if is_balanced or index is None else recut(cuts, balanced, index)
        return _AxisPlan(comm, self._dim, sizes, halo=balance)

    def _users(self, name: str) -> Partition | None:
        if name == "bias" and not self._splits_output:  # each rank adds the whole of it
            return self.P_x if self.P_x.active else None
        return super()._users(name)

    def forward(self, input: Tensor) -> Tensor:
        """Return this rank's block of the sum, with the bias added once."""
        if not self._takes_part:
            return self._outside(input)
        if self._splits_output:
            weight, *bias = self._blocks_of(*self._blocks)
        else:
            (weight,) = self._blocks_of("weight")
            bias = self._blocks_of("bias") if self.use_bias else []
        window = self._window(input)
        y = F.linear(window, weight)
        if self._plan.comm.size > 1:
            y = ReduceScatterMap.apply(y, self._plan)
        return y + bias[0].to(y.dtype) if bias else y


def _moved_dim(name: str, split: Partition, other: Partition) -> int:
    """Return the tensor dim that is gathered or scattered: the last, or the one before it."""
    if split == other:
        return split.dim - 1
    expected = (*split.shape[:-2], split.shape[-2] * split.shape[-1], 1) if split.dim > 1 else ()
    fits = split.ranks == other.ranks and split.dim > 1 and split.shape[-2] == 1
    if not fits or other.shape != expected:
        raise PartitionError.because(
            name,
            f"{split!r} and {other!r}",
            "both partitions hold the same ranks, one splits the last dim, one the second-last",
            f"Partition({list(expected) or [1, 2]})",
        )
    return split.dim - 2


def _check_features(in_features: int, out_features: int) -> tuple[int, int]:
    return (
        expect_int("in_features", in_features, 1, error=PartitionError),
        expect_int("out_features", out_features, 1, error=PartitionError),
    )


class _Columns(torch.autograd.Function):
    """Own block of the input, weight, bias -> own output features.

    In the backward the gradient of the input travels while that of the weight is computed. In
    shared memory, where the copying is ours, one follows the other.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: BlockPlan
    ) -> Tensor:
        joined = AllGatherMap.kernel(x, plan)
        ctx.plan = plan
        ctx.save_for_backward(x, weight, bias, joined)
        return F.linear(joined, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, joined = ctx.saved_tensors
        plan, (dy,), needs = ctx.plan, grads, ctx.needs_input_grad
        if torch.is_grad_enabled():  # a derivative of this is wanted: let autograd write it

            def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
                return F.linear(AllGatherMap.apply(x, plan), weight, bias)

            return *slopes(forward, (x, weight, bias), needs[:3], dy), None
        comm, pending = plan.comm, None
        if needs[0]:
            start = comm if comm.backend == "shm" else comm.start
            pending = start.reduce_scatter(dy @ weight, plan.dim, plan.sizes)
        count = math.prod(dy.shape[:-1])
        rows = dy.reshape(count, dy.shape[-1])
        dw = rows.T @ joined.reshape(count, joined.shape[-1]) if needs[1] else None
        db = rows.sum(0) if needs[2] else None
        dx = pending.wait() if isinstance(pending, Pending) else pending
        return dx, dw, db, None
