"""Linear layers split over ranks: a grid of weight blocks, or one axis of ranks.

`DistributedLinear` has input, weight and output on three partitions. `DistributedLinearAllGather`
(column-parallel) and `DistributedLinearReduceScatter` (row-parallel) are the halves of a wide MLP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unisono.comm import Communicator
from unisono.errors import PartitionError
from unisono.expect import expect_int
from unisono.nn.agreement import Cuts, Table
from unisono.nn.layers.grid import GridLayer
from unisono.nn.parameters import Holding, Weights, check_weights, nothing, part, whole
from unisono.nn.planned import PlannedModule, balanced_in, check_sizes, recut
from unisono.operators import AllGatherMap, ReduceScatterMap
from unisono.operators.gather import BlockPlan
from unisono.topology import Partition
from unisono.topology.decompose import Interval, block, split_sizes
from unisono.topology.halo import HaloPlan


@dataclass(frozen=True)
class SubLinear:
    """The local part of a distributed linear layer."""

    weight: Tensor
    bias: Tensor | None


class DistributedLinear(GridLayer):
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
        self.in_features, self.out_features = _check_features(in_features, out_features)
        self.weights: Weights = check_weights(weights)
        self._lay_out(P_x, P_y, P_w, P_x.dim - 1)
        self._make_parameters((self.out_features, self.in_features), bias, dtype, device)

    @property
    def sublinear(self) -> SubLinear:
        """The local weight block and bias."""
        return SubLinear(self.weight, self.bias)

    def _blocks(self, index: Sequence[int]) -> tuple[Interval, Interval]:
        _, outs, ins = self._grid.shape
        return block(self.out_features, outs, index[1]), block(self.in_features, ins, index[2])

    def _check(self, shape: Sequence[int]) -> None:
        check_sizes("DistributedLinear", [self.in_features], [-1], shape)

    def _window_at(self, cuts: Cuts, index: Sequence[int]) -> HaloPlan:
        return recut(cuts, balanced_in(cuts, -1), index)

    def _product(
        self,
        window: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        shape: tuple[int, ...],  # noqa: ARG002
    ) -> Tensor:
        return F.linear(window, weight, bias)


@dataclass(frozen=True)
class _AxisPlan(BlockPlan):
    halo: HaloPlan | None = None
    """Moves input features to balanced blocks, those of the weight; None where they are."""


class _OneAxisLinear(PlannedModule):
    """What the column- and row-parallel layers share: one axis of ranks, blocks of one dim."""

    _plan: _AxisPlan

    def __init__(
        self, P_x: Partition, P_y: Partition, split: Partition, in_features: int, out_features: int,
        bias: bool, weights: Weights,
    ) -> None:  # fmt: skip
        super().__init__()
        self.P_x, self.P_y = P_x, P_y
        self._P = split
        """The one whose last axis splits the features."""
        other = P_x if split is P_y else P_y
        self._dim = _moved_dim(type(self).__name__, split, other)
        self.in_features, self.out_features = _check_features(in_features, out_features)
        self.use_bias = bias
        self.weights: Weights = check_weights(weights)

    def _share(self, shape: tuple[int, ...], dim: int) -> Holding:
        """Return the own block of a parameter, of which the features in one dim are cut."""
        if self._P.index is None:
            return nothing(shape)
        return part(shape, {dim: block(shape[dim], self._P.shape[-1], self._P.index[-1])})

    def _users(self, name: str) -> Partition | None:  # noqa: ARG002
        """Return the ranks that use this rank's block of a parameter: same place on the axis."""
        return self._P.sub(tuple(range(self._P.dim - 1))) if self._P.active else None

    def _cuts_of(self, table: Table) -> Cuts:
        """Return the cuts of the input; raise unless it has as many features as the layer."""
        table.dtype(self.P_x)
        cuts = table.cuts(self.P_x)
        sizes = [cut[-1] for cut in cuts]
        check_sizes(type(self).__name__, [self.in_features], [-1], sizes)
        return cuts

    @property
    def _axis(self) -> Communicator:
        """The ranks along the feature axis."""
        return self._P.sub(self._P.dim - 1).comm


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
        super().__init__(outer, P_y, P_y, in_features, out_features, bias, weights)
        shape = (self.out_features, self.in_features)
        biases = self._share(shape[:1], 0) if bias else None
        self._draw(self._share(shape, 0), biases, dtype=dtype, device=device)

    def _make_plan(self, tables: Sequence[Table]) -> _AxisPlan:
        cuts = self._cuts_of(tables[0])
        sizes = tuple(b - a for a, b in pairwise(cuts[self._dim]))
        return _AxisPlan(self._axis, self._dim, sizes)

    def forward(self, input: Tensor) -> Tensor:
        """Return `[*, out_features / ranks]`."""
        if not self._takes_part:
            return self._outside(input)
        x = self._tied(input)
        if self._plan.comm.size > 1:
            x = AllGatherMap.apply(x, self._plan)
        return F.linear(x, *self._used("weight", "bias"))


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
        super().__init__(P_x, outer, P_x, in_features, out_features, bias, weights)
        shape = (self.out_features, self.in_features)
        biases = None
        if bias:
            whole_or_none = whole if P_x.active else nothing
            biases = self._share(shape[:1], 0) if self._splits_output else whole_or_none(shape[:1])
        self._draw(self._share(shape, 1), biases, dtype=dtype, device=device)

    @property
    def _splits_output(self) -> bool:
        return self._dim == self.P_x.dim - 1

    def _make_plan(self, tables: Sequence[Table]) -> _AxisPlan:
        cuts, index, comm = self._cuts_of(tables[0]), self.P_x.index, self._axis
        length = self.out_features if self._splits_output else cuts[self._dim][-1]
        move = None if index is None else recut(cuts, balanced_in(cuts, -1), index)
        return _AxisPlan(comm, self._dim, split_sizes(length, comm.size), halo=move)

    def _users(self, name: str) -> Partition | None:
        if name == "bias" and not self._splits_output:  # each rank adds the whole of it
            return self.P_x if self.P_x.active else None
        return super()._users(name)

    def forward(self, input: Tensor) -> Tensor:
        """Return this rank's block of the sum, with the bias added once."""
        if not self._takes_part:
            return self._outside(input)
        if self._splits_output:
            weight, *bias = self._used("weight", "bias")
        else:  # other ranks use the bias
            (weight,), bias = self._used("weight"), self._used("bias")
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
