"""`DistributedLinear`: input, weight and output split over three partitions, a grid of blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from unisono.comm import Communicator
from unisono.errors import PartitionError
from unisono.nn.autocast import collect_products
from unisono.nn.linear_axis import DistributedLinearAllGather, DistributedLinearReduceScatter
from unisono.nn.linear_checks import check_features, check_width
from unisono.nn.parameters import (
    Holding,
    Weights,
    check_weights,
    draw_weight_and_bias,
    nothing,
    replicated_or_root,
)
from unisono.nn.state import HoldingModule
from unisono.nn.structure import Cuts, Table
from unisono.nn.windows import balanced_in, recut
from unisono.operators.halo import HaloExchange, HaloOnGroup
from unisono.operators.partitioned import FanPlan, fan_plan, spread
from unisono.topology import Partition
from unisono.topology.decompose import block
from unisono.topology.fanout import broadcast_groups, reduce_groups
from unisono.topology.halo import HaloPlan

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
        check_features("DistributedLinear", in_features, out_features)
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
        check_width("DistributedLinear", cuts, self.in_features)
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
        index = self.P_x.index
        return _GridPlan(
            None if index is None else recut(cuts, balanced_in(cuts, -1), index),
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

    def forward(self, input: Tensor) -> Tensor:
        """Return this rank's block of the output on `P_y`."""
        if not self._takes_part:
            return self._outside(input)
        plan = self._plan
        held = self._tied(input)
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
        return collect_products(held, plan.to_outputs)


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
