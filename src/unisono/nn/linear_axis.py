"""Linear layers on one axis of ranks: column- and row-parallel, the halves of a wide MLP."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unisono.comm import Communicator
from unisono.errors import PartitionError
from unisono.nn.linear_checks import check_features, check_width
from unisono.nn.parameters import (
    Holding,
    draw_weight_and_bias,
    nothing,
    summed_gradients,
    whole,
)
from unisono.nn.state import HoldingModule
from unisono.nn.structure import Table
from unisono.operators import AllGather, ReduceScatter
from unisono.operators.plans import BlockPlan
from unisono.topology import Partition
from unisono.topology.decompose import block, split_cuts, split_sizes

__all__ = ["DistributedLinearAllGather", "DistributedLinearReduceScatter"]


class _OneAxisLinear(HoldingModule[BlockPlan]):
    """What the column- and row-parallel layers share: one axis of ranks, blocks of one dim."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self, P_x: Partition, P_y: Partition, split: Partition, in_features: int, out_features: int
    ) -> None:
        super().__init__()
        check_features(type(self).__name__, in_features, out_features)
        self.P_x, self.P_y = P_x, P_y
        self._P = split
        """The one whose last axis splits the features."""
        other = P_x if split is P_y else P_y
        self._dim = _moved_dim(type(self).__name__, split, other)
        self.in_features, self.out_features = in_features, out_features

    def _draw(
        self,
        own: Holding,
        own_bias: Holding | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        """Draw the own blocks of weight and bias."""
        self.use_bias = own_bias is not None
        self.weight, self.bias = draw_weight_and_bias(
            self._control(), own, own_bias, dtype=dtype, device=device
        )
        self._hold("weight", own, replicated=False)
        if own_bias is not None:
            self._hold("bias", own_bias, replicated=False)

    def _own_share(self, count: int) -> tuple[int, int] | None:
        """Return the own range of `count` features; None on a rank outside."""
        if self._P.index is None:
            return None
        return block(count, self._P.shape[-1], self._P.index[-1])

    def _describe(self) -> tuple[object, ...]:
        return (self.P_x, self.P_y, self.in_features, self.out_features, self.use_bias)

    def _leading(self) -> Partition:
        """Return the ranks that hold this rank's blocks: same place on the feature axis."""
        return self._P.sub(tuple(range(self._P.dim - 1)))

    def _axis(self) -> Communicator:
        """Return the ranks along the feature axis."""
        return self._P.sub(self._P.dim - 1).comm

    def _gradient_comm(self, name: str) -> Communicator | None:  # noqa: ARG002
        return self._leading().comm if self._P.active else None

    def _own_parameters(self) -> tuple[Tensor, Tensor | None]:
        held = [p for p in (self.weight, self.bias) if p is not None]
        w, *b = summed_gradients(self._leading().comm, *held) if self._sums_gradients else held
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
        super().__init__(P_y if P_x is None else P_x, P_y, P_y, in_features, out_features)
        shape = (out_features, in_features)
        own, own_bias = nothing(shape), nothing(shape[:1])
        share = self._own_share(out_features)
        if share is not None:
            size = share[1] - share[0]
            own = Holding(shape, (share[0], 0), (size, in_features))
            own_bias = Holding(shape[:1], (share[0],), (size,))
        self._draw(own, own_bias if bias else None, device, dtype)

    def _make_plan(self, tables: Sequence[Table]) -> BlockPlan:
        (table,) = tables
        table.dtype(self.P_x)
        cuts = table.cuts(self.P_x)
        check_width("DistributedLinearAllGather", cuts, self.in_features)
        sizes = tuple(b - a for a, b in pairwise(cuts[self._dim]))
        return BlockPlan(self._axis(), self._dim, sizes)

    def forward(self, x: Tensor) -> Tensor:
        """Return `[*, out_features / ranks]`."""
        if not self._takes_part:
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
        super().__init__(P_x, P_x if P_y is None else P_y, P_x, in_features, out_features)
        shape = (out_features, in_features)
        own, own_bias = nothing(shape), nothing(shape[:1])
        share, outs = self._own_share(in_features), self._own_share(out_features)
        if share is not None and outs is not None:
            own = Holding(shape, (0, share[0]), (out_features, share[1] - share[0]))
            own_bias = whole(shape[:1])
            if self._splits_output:
                own_bias = Holding(shape[:1], (outs[0],), (outs[1] - outs[0],))
        self._draw(own, own_bias if bias else None, device, dtype)

    @property
    def _splits_output(self) -> bool:
        return self._dim == self.P_x.dim - 1

    def _make_plan(self, tables: Sequence[Table]) -> BlockPlan:
        (table,) = tables
        table.dtype(self.P_x)
        cuts = table.cuts(self.P_x)
        check_width("DistributedLinearReduceScatter", cuts, self.in_features)
        _check_balanced("DistributedLinearReduceScatter", cuts[-1])
        comm = self._axis()
        length = self.out_features if self._splits_output else cuts[self._dim][-1]
        return BlockPlan(comm, self._dim, split_sizes(length, comm.size))

    def _gradient_comm(self, name: str) -> Communicator | None:
        if name == "bias" and not self._splits_output and self.P_x.active:
            return self.P_x.comm
        return super()._gradient_comm(name)

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's block of the sum, with the bias added once."""
        if not self._takes_part:
            return self._outside(x)
        if self._splits_output or self.bias is None:
            weight, bias = self._own_parameters()
        else:
            (weight,) = self._summed(self._leading().comm, self.weight)
            (bias,) = self._summed(self.P_x.comm, self.bias)
        partial = F.linear(self._tied(x), weight)
        y = ReduceScatter.apply(partial, self._plan) if self._plan.comm.size > 1 else partial
        return y if bias is None else y + bias.to(y.dtype)

    def _summed(self, comm: Communicator, held: Tensor) -> tuple[Tensor, ...]:
        return summed_gradients(comm, held) if self._sums_gradients else (held,)


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


def _check_balanced(name: str, cuts: Sequence[int]) -> None:
    balanced = split_cuts(cuts[-1], len(cuts) - 1)
    if tuple(cuts) != tuple(balanced):
        raise PartitionError.because(
            name,
            f"input features cut at {list(cuts)}",
            f"balanced cuts are {list(balanced)}",
            "Repartition(P_x, P_x) first",
        )
