"""Linear layers whose features are split: by a grid of weight blocks, by rows, or by columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unisono.comm import Communicator
from unisono.errors import PartitionError
from unisono.nn.parameters import (
    Holding,
    Weights,
    check_weights,
    draw_weight_and_bias,
    nothing,
    replicated_or_root,
    summed_gradients,
    whole,
)
from unisono.nn.state import HoldingModule
from unisono.nn.structure import Cuts, Table
from unisono.nn.windows import block_windows
from unisono.operators import AllGather, ReduceScatter
from unisono.operators.halo import HaloExchange, HaloOnGroup
from unisono.operators.partitioned import FanPlan, collect, fan_plan, spread
from unisono.operators.plans import BlockPlan
from unisono.topology import Partition, halo
from unisono.topology.decompose import block, split_cuts, split_sizes
from unisono.topology.fanout import broadcast_groups, reduce_groups
from unisono.topology.halo_plan import HaloPlan

__all__ = ["DistributedLinear", "DistributedLinearAllGather", "DistributedLinearReduceScatter"]


@dataclass(frozen=True)
class SubLinear:
    """The local part of a distributed linear layer."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class _GridPlan:
    balance: HaloPlan | None
    """Moves features to balanced blocks, where the input's are not; on a rank of `P_x`."""
    to_weights: FanPlan
    to_outputs: FanPlan
    partial_shape: tuple[int, ...]


class DistributedLinear(HoldingModule[_GridPlan]):
    """`torch.nn.Linear` with input, weight and output split over three partitions.

    Args:
        P_x: partition of the input `[*, in_features]`; its last dim splits the features.
        P_y: partition of the output, the same but for its last dim.
        P_w: partition of the weight, `[out, in]` blocks; with a leading batch dim if `P_x` has one.
        in_features: of the whole layer; likewise `out_features`.
        bias: held where the input features begin.
    """

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
        _check_features("DistributedLinear", in_features, out_features)
        self.P_x, self.P_y, self.P_w = P_x, P_y, P_w
        self.in_features, self.out_features = in_features, out_features
        self.weights: Weights = check_weights(weights)
        self.use_bias = bias
        self._grid = _linear_grid(P_x, P_y, P_w)
        shape = (out_features, in_features)
        own: Holding = nothing(shape)
        own_bias: Holding = nothing(shape[:1])
        index = self._index
        if index is not None and (weights == "replicated" or index[0] == 0):
            (c0, c1), (k0, k1) = self._blocks(index)
            own = Holding(shape, (c0, k0), (c1 - c0, k1 - k0))
            if index[2] == 0:
                own_bias = Holding(shape[:1], (c0,), (c1 - c0,))
        self.weight, self.bias = draw_weight_and_bias(
            self._control(), own, own_bias if bias else None, dtype=dtype, device=device
        )
        self._hold("weight", own, replicated=False)
        if bias:
            self._hold("bias", own_bias, replicated=False)

    @property
    def sublinear(self) -> SubLinear:
        """The local weight block and bias."""
        return SubLinear(self.weight, self.bias)

    @property
    def _index(self) -> tuple[int, ...] | None:
        """Own place in the weight grid: batch, output features, input features."""
        me = self._grid.root.rank
        if me not in self._grid.ranks:
            return None
        return self._grid.index_of(self._grid.ranks.index(me))

    def _blocks(self, index: Sequence[int]) -> tuple[tuple[int, int], tuple[int, int]]:
        _, outs, ins = self._grid.shape
        return block(self.out_features, outs, index[1]), block(self.in_features, ins, index[2])

    def _describe(self) -> tuple[object, ...]:
        counts = (self.in_features, self.out_features, self.use_bias, self.weights)
        return (self.P_x, self.P_y, self.P_w, *counts)

    def _make_plan(self, tables: Sequence[Table]) -> _GridPlan:
        (table,) = tables
        dtype = table.dtype(self.P_x)
        cuts = table.cuts(self.P_x)
        _check_width("DistributedLinear", cuts, self.in_features)
        batch, outs, _ = self._grid.shape
        root = self.P_x.root
        few_x = self.P_x.reshape((batch, 1, self.P_x.shape[-1]))
        few_y = self.P_y.reshape((batch, outs, 1))
        shapes = {
            rank: _balanced_shape(cuts, self.P_x, place)
            for place, rank in enumerate(self.P_x.ranks)
        }
        sources = broadcast_groups(few_x, self._grid)
        partials: dict[int, tuple[int, ...]] = {}
        for group in sources:
            for reader in group.peers:
                (c0, c1), _ = self._blocks(self._grid.index_of(self._grid.ranks.index(reader)))
                partials[reader] = (*shapes[group.root][:-1], c1 - c0)
        sums = reduce_groups(self._grid, few_y)
        mine = table.of(root.rank).shape
        return _GridPlan(
            _feature_balance(cuts, self.P_x) if self.P_x.active else None,
            fan_plan(sources, root, [shapes[group.root] for group in sources], dtype),
            fan_plan(
                sums,
                root,
                [partials[group.peers[0]] for group in sums],
                dtype,
                empty=(*mine[:1], 0),
            ),
            partials.get(root.rank, (0,)),
        )

    def _replicas(self) -> Partition:
        return self._grid.sub(0, rank=self._grid.ranks.index(self._grid.root.rank))

    def _gradient_comm(self, name: str) -> Communicator | None:  # noqa: ARG002
        if self._index is None or self.weights != "replicated":
            return None
        return self._replicas().comm

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's block of the output on `P_y`."""
        if not self._takes_part:
            return self._outside(x)
        plan = self._plan
        held = self._tied(x)
        if plan.balance is not None and not plan.balance.is_identity:
            on_group = HaloOnGroup(self.P_x.root, plan.balance, self.P_x.ranks, 0.0)
            held = HaloExchange.apply(held, on_group)
        held = spread(held, plan.to_weights)
        index = self._index
        if index is not None:
            (c0, c1), (k0, k1) = self._blocks(index)
            own = [self.weight]
            shapes: list[tuple[int, ...]] = [(c1 - c0, k1 - k0)]
            if self.bias is not None and index[2] == 0:
                own.append(self.bias)
                shapes.append((c1 - c0,))
            weight, *rest = replicated_or_root(
                self._replicas(), self.weights, shapes, own, sums=self._sums_gradients
            )
            held = F.linear(held, weight, rest[0] if rest else None)
        return collect(held, plan.to_outputs)


class _OneAxisLinear(HoldingModule[BlockPlan]):
    """What the column- and row-parallel layers share: one axis of ranks, blocks of one dim."""

    in_features: int
    out_features: int
    weight: nn.Parameter
    bias: nn.Parameter | None
    _P: Partition
    """Partition whose axis splits the features."""

    def _leading(self) -> Partition:
        """Return the ranks that hold this rank's blocks: same place on the feature axis."""
        return self._P.sub(tuple(axis for axis in range(self._P.dim) if axis != self._feature_axis))

    @property
    def _feature_axis(self) -> int:
        return self._P.dim - 1

    def _gradient_comm(self, name: str) -> Communicator | None:  # noqa: ARG002
        return self._leading().comm if self._P.active else None

    def _own_parameters(self) -> tuple[Tensor, Tensor | None]:
        held = [p for p in (self.weight, self.bias) if p is not None]
        comm = self._leading().comm
        w, *b = summed_gradients(comm, *held) if self._sums_gradients else held
        return w, b[0] if b else None


class DistributedLinearAllGather(_OneAxisLinear):
    """Column-parallel linear: the input is gathered, each rank computes its output features.

    Args:
        P_y: partition of the output; its last dim splits the output features.
        in_features: of the whole layer; likewise `out_features`.
        bias: one block a rank.
        P_x: partition of the input, if its second-last dim is split instead of its features.
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
    ) -> None:
        super().__init__()
        _check_features("DistributedLinearAllGather", in_features, out_features)
        self.P_y = self._P = P_y
        self.P_x = P_y if P_x is None else P_x
        self._dim = _moved_dim("DistributedLinearAllGather", P_y, self.P_x)
        self.in_features, self.out_features = in_features, out_features
        shape = (out_features, in_features)
        own, own_bias = nothing(shape), nothing(shape[:1])
        if P_y.active and P_y.index is not None:
            c0, c1 = block(out_features, P_y.shape[-1], P_y.index[-1])
            own = Holding(shape, (c0, 0), (c1 - c0, in_features))
            own_bias = Holding(shape[:1], (c0,), (c1 - c0,))
        self.use_bias = bias
        self.weight, self.bias = draw_weight_and_bias(
            self._control(), own, own_bias if bias else None, dtype=dtype, device=device
        )
        self._hold("weight", own, replicated=False)
        if bias:
            self._hold("bias", own_bias, replicated=False)

    def _describe(self) -> tuple[object, ...]:
        return (self.P_x, self.P_y, self.in_features, self.out_features, self.use_bias)

    def _make_plan(self, tables: Sequence[Table]) -> BlockPlan:
        (table,) = tables
        table.dtype(self.P_x)
        cuts = table.cuts(self.P_x)
        _check_width("DistributedLinearAllGather", cuts, self.in_features)
        sizes = tuple(b - a for a, b in pairwise(cuts[self._dim]))
        comm = self.P_y.sub(self._feature_axis).comm
        return BlockPlan(comm, self._dim, sizes)

    def forward(self, x: Tensor) -> Tensor:
        """Return `[*, out_features / ranks]`."""
        if not self.P_y.active:
            return self._outside(x)
        tied = self._tied(x)
        gathered = AllGather.apply(tied, self._plan) if self._plan.comm.size > 1 else tied
        return F.linear(gathered, *self._own_parameters())


class DistributedLinearReduceScatter(_OneAxisLinear):
    """Row-parallel linear: each rank multiplies its input features, sums are cut into blocks.

    Args:
        P_x: partition of the input; its last dim splits the input features.
        in_features: of the whole layer; likewise `out_features`.
        bias: added once, after the sum.
        P_y: partition of the output, if its second-last dim is to be split instead of its features.
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
    ) -> None:
        super().__init__()
        _check_features("DistributedLinearReduceScatter", in_features, out_features)
        self.P_x = self._P = P_x
        self.P_y = P_x if P_y is None else P_y
        self._dim = _moved_dim("DistributedLinearReduceScatter", P_x, self.P_y)
        self.in_features, self.out_features = in_features, out_features
        shape = (out_features, in_features)
        own, own_bias = nothing(shape), nothing(shape[:1])
        if P_x.active and P_x.index is not None:
            k0, k1 = block(in_features, P_x.shape[-1], P_x.index[-1])
            own = Holding(shape, (0, k0), (out_features, k1 - k0))
            if self._splits_output:
                c0, c1 = block(out_features, P_x.shape[-1], P_x.index[-1])
                own_bias = Holding(shape[:1], (c0,), (c1 - c0,))
            else:
                own_bias = whole(shape[:1])
        self.use_bias = bias
        self.weight, self.bias = draw_weight_and_bias(
            self._control(), own, own_bias if bias else None, dtype=dtype, device=device
        )
        self._hold("weight", own, replicated=False)
        if bias:
            self._hold("bias", own_bias, replicated=False)

    @property
    def _splits_output(self) -> bool:
        return self._dim == self.P_x.dim - 1

    def _describe(self) -> tuple[object, ...]:
        return (self.P_x, self.P_y, self.in_features, self.out_features, self.use_bias)

    def _make_plan(self, tables: Sequence[Table]) -> BlockPlan:
        (table,) = tables
        table.dtype(self.P_x)
        cuts = table.cuts(self.P_x)
        _check_width("DistributedLinearReduceScatter", cuts, self.in_features)
        _check_balanced("DistributedLinearReduceScatter", cuts[-1])
        comm = self.P_x.sub(self._feature_axis).comm
        length = self.out_features if self._splits_output else cuts[self._dim][-1]
        return BlockPlan(comm, self._dim, split_sizes(length, comm.size))

    def _gradient_comm(self, name: str) -> Communicator | None:
        if name == "bias" and not self._splits_output and self.P_x.active:
            return self.P_x.comm
        return super()._gradient_comm(name)

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's block of the sum, with the bias added once."""
        if not self.P_x.active:
            return self._outside(x)
        if self._splits_output or self.bias is None:
            weight, bias = self._own_parameters()
        else:
            (weight,) = self._summed(self._leading().comm, self.weight)
            (bias,) = self._summed(self.P_x.comm, self.bias)
        partial = F.linear(self._tied(x), weight)
        y = ReduceScatter.apply(partial, self._plan) if self._plan.comm.size > 1 else partial
        return y if bias is None else y + bias

    def _summed(self, comm: Communicator, held: Tensor) -> tuple[Tensor, ...]:
        return summed_gradients(comm, held) if self._sums_gradients else (held,)


def _linear_grid(P_x: Partition, P_y: Partition, P_w: Partition) -> Partition:
    """Return `P_w` as batch, output features, input features; refuse what does not fit."""
    P_x.check_same_root(P_y)
    P_x.check_same_root(P_w)
    lead = math.prod(P_x.shape[:-1])
    ins, outs = P_x.shape[-1], P_y.shape[-1]
    shapes = f"P_x {list(P_x.shape)}, P_y {list(P_y.shape)}, P_w {list(P_w.shape)}"
    if P_x.shape[:-1] != P_y.shape[:-1]:
        raise PartitionError.because(
            "DistributedLinear",
            shapes,
            f"{list(P_x.shape[:-1])} != {list(P_y.shape[:-1])} before the last dim",
            "P_x and P_y may differ in their last dim only",
        )
    fitting = [(lead, outs, ins), (*P_x.shape[:-1], outs, ins)]
    if lead == 1:
        fitting.insert(0, (outs, ins))
    if P_w.shape not in fitting:
        raise PartitionError.because(
            "DistributedLinear",
            shapes,
            f"P_w must be {list(fitting[0])}",
            f"Partition({list(fitting[0])})",
        )
    return P_w.reshape((lead, outs, ins))


def _balanced_shape(cuts: Cuts, P_x: Partition, place: int) -> tuple[int, ...]:
    """Return the shape of a block of `P_x` whose features are balanced."""
    index = P_x.index_of(place)
    lead = [own[i + 1] - own[i] for own, i in zip(cuts[:-1], index[:-1], strict=True)]
    start, stop = block(cuts[-1][-1], P_x.shape[-1], index[-1])
    return (*lead, stop - start)


def _feature_balance(cuts: Cuts, P_x: Partition) -> HaloPlan:
    """Return the plan that moves features to balanced blocks and nothing else."""
    index = P_x.index
    if index is None:  # a rank outside never plans
        raise PartitionError(f"{P_x!r} has no place for this rank")
    wanted = [*cuts[:-1], split_cuts(cuts[-1][-1], P_x.shape[-1])]
    shares = [(own[i], own[i + 1]) for own, i in zip(wanted, index, strict=True)]
    return halo.plan_windows(cuts, index, [block_windows(own) for own in wanted], shares)


def _moved_dim(name: str, split: Partition, other: Partition) -> int:
    """Return the tensor dim that is gathered or scattered: the last, or the one before it."""
    if split == other:
        return split.dim - 1
    expected = (*split.shape[:-2], split.shape[-2] * split.shape[-1], 1) if split.dim > 1 else ()
    if split.ranks != other.ranks or split.dim < 2 or split.shape[-2] != 1:
        raise PartitionError.because(
            name,
            f"{split!r} and {other!r}",
            "both partitions hold the same ranks, one splits the last dim, one the second-last",
            f"Partition({list(expected) or [1, 2]})",
        )
    if other.shape != expected:
        raise PartitionError.because(
            name, f"{split!r} and {other!r}", None, f"Partition({list(expected)})"
        )
    return split.dim - 2


def _check_features(name: str, in_features: int, out_features: int) -> None:
    if min(in_features, out_features) < 1:
        raise PartitionError.because(
            f"{name}(in_features={in_features}, out_features={out_features})",
            "numbers of the whole layer",
            f"{min(in_features, out_features)} < 1",
            "positive numbers",
        )


def _check_width(name: str, cuts: Cuts, in_features: int) -> None:
    if cuts[-1][-1] != in_features:
        raise PartitionError.because(
            f"{name}(in_features={in_features})",
            f"an input of global shape {[own[-1] for own in cuts]}",
            f"{cuts[-1][-1]} features != {in_features}",
            f"in_features={cuts[-1][-1]}",
        )


def _check_balanced(name: str, cuts: Sequence[int]) -> None:
    balanced = split_cuts(cuts[-1], len(cuts) - 1)
    if tuple(cuts) != tuple(balanced):
        raise PartitionError.because(
            name,
            f"input features cut at {list(cuts)}",
            f"balanced cuts are {list(balanced)}",
            "Repartition(P_x, P_x) first",
        )
