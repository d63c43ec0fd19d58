"""Linear layers on one axis of ranks: column- and row-parallel, the halves of a wide MLP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unisono.comm import Communicator
from unisono.errors import PartitionError
from unisono.nn.linear_checks import check_features, check_width
from unisono.nn.linear_overlap import Columns, Gathering, Product, Rows
from unisono.nn.parameters import (
    Holding,
    Weights,
    check_weights,
    draw_weight_and_bias,
    held_by,
    nothing,
    replicated_or_root,
    whole,
)
from unisono.nn.state import HoldingModule
from unisono.nn.structure import Table, is_plain
from unisono.nn.windows import balanced_in, recut
from unisono.operators import AllGather, ReduceScatter
from unisono.operators.gather import BlockPlan
from unisono.operators.halo import HaloExchange, HaloOnGroup
from unisono.topology import Partition
from unisono.topology.decompose import block, split_sizes
from unisono.topology.halo import HaloPlan

__all__ = ["DistributedLinearAllGather", "DistributedLinearReduceScatter"]


@dataclass(frozen=True)
class _AxisPlan(BlockPlan):
    balance: HaloPlan | None = None
    """Moves input features to balanced blocks, those of the weight; None where they are."""


class _OneAxisLinear(HoldingModule[_AxisPlan]):
    """What the column- and row-parallel layers share: one axis of ranks, blocks of one dim."""

    _word_travels = "beside"
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self, P_x: Partition, P_y: Partition, split: Partition, in_features: int, out_features: int,
        weights: Weights,
    ) -> None:  # fmt: skip
        super().__init__()
        check_features(type(self).__name__, in_features, out_features)
        self.P_x, self.P_y = P_x, P_y
        self._P = split
        """The one whose last axis splits the features."""
        other = P_x if split is P_y else P_y
        self._dim = _moved_dim(type(self).__name__, split, other)
        self.in_features, self.out_features = in_features, out_features
        self.weights: Weights = check_weights(weights)

    def _draw(
        self,
        own: Holding,
        own_bias: Holding | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        """Draw the blocks of weight and bias that this rank uses, and keep those it holds."""
        self.use_bias = own_bias is not None
        self._blocks = {"weight": own.shape}
        own = held_by(self._users("weight"), self.weights, own)
        if own_bias is not None:
            self._blocks["bias"] = own_bias.shape
            own_bias = held_by(self._users("bias"), self.weights, own_bias)
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
        features = (self.in_features, self.out_features, self.use_bias, self.weights)
        return (self.P_x, self.P_y, *features)

    def _users(self, name: str) -> Partition | None:  # noqa: ARG002
        """Return the ranks that use this rank's block of a parameter: same place on the axis."""
        return self._P.sub(tuple(range(self._P.dim - 1))) if self._P.active else None

    def _axis(self) -> Communicator:
        """Return the ranks along the feature axis."""
        return self._P.sub(self._P.dim - 1).comm

    def _gradient_comm(self, name: str) -> Communicator | None:
        users = self._users(name)
        return users.comm if users is not None and self.weights == "replicated" else None

    def _used(self, *names: str) -> list[Tensor]:
        """Return the blocks of parameters that the same ranks use, in one message."""
        users = self._users(names[0])
        if users is None:
            raise PartitionError(f"{type(self).__name__} has no block on a rank outside")
        held = [self.get_parameter(name) for name in names]
        shapes = [self._blocks[name] for name in names]
        return replicated_or_root(users, self.weights, shapes, held, sums=self._sums_gradients)


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
        given = P_y if P_x is None else P_x
        super().__init__(given, P_y, P_y, in_features, out_features, weights)
        shape = (out_features, in_features)
        own, own_bias = nothing(shape), nothing(shape[:1])
        share = self._own_share(out_features)
        if share is not None:
            size = share[1] - share[0]
            own = Holding(shape, (share[0], 0), (size, in_features))
            own_bias = Holding(shape[:1], (share[0],), (size,))
        self._draw(own, own_bias if bias else None, device, dtype)

    def _make_plan(self, tables: Sequence[Table]) -> _AxisPlan:
        (table,) = tables
        table.dtype(self.P_x)
        cuts = table.cuts(self.P_x)
        check_width("DistributedLinearAllGather", cuts, self.in_features)
        sizes = tuple(b - a for a, b in pairwise(cuts[self._dim]))
        return _AxisPlan(self._axis(), self._dim, sizes)

    def forward(self, input: Tensor) -> Tensor:
        """Return `[*, out_features / ranks]`."""
        if not self._takes_part:
            return self._outside(input)
        is_alone = self._plan.comm.size == 1
        if is_alone or torch.compiler.is_compiling():
            self._answer_first((input,))
            tied = self._tied(input)
            joined = tied if is_alone else AllGather.apply(tied, self._plan)
            return F.linear(joined, *self._used(*self._blocks))

        def start(fits: bool) -> Gathering:
            return Gathering(input.detach() if fits else self._nothing(), self._plan)

        joined = self._under_way(start, (input,)).take()
        tied = self._tied(input)
        weight, *bias = self._used(*self._blocks)
        if is_plain(input):
            return Columns.apply(tied, weight, bias[0] if bias else None, self._plan, joined)
        joined = AllGather.apply(tied, replace(self._plan, landed=joined))
        return F.linear(joined, weight, *bias)


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
        given = P_x if P_y is None else P_y
        super().__init__(P_x, given, P_x, in_features, out_features, weights)
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

    def _make_plan(self, tables: Sequence[Table]) -> _AxisPlan:
        (table,) = tables
        table.dtype(self.P_x)
        cuts = table.cuts(self.P_x)
        check_width("DistributedLinearReduceScatter", cuts, self.in_features)
        balanced, index = balanced_in(cuts, -1), self.P_x.index
        comm = self._axis()
        length = self.out_features if self._splits_output else cuts[self._dim][-1]
        sizes = split_sizes(length, comm.size)
        is_balanced = balanced == tuple(map(tuple, cuts))
        balance = None if is_balanced or index is None else recut(cuts, balanced, index)
        return _AxisPlan(comm, self._dim, sizes, balance=balance)

    def _halo(self) -> HaloOnGroup | None:
        balance = self._plan.balance
        return None if balance is None else self._on_ranks(balance, self.P_x.ranks)

    def _users(self, name: str) -> Partition | None:
        if name == "bias" and not self._splits_output:  # each rank adds the whole of it
            return self.P_x if self.P_x.active else None
        return super()._users(name)

    def forward(self, input: Tensor) -> Tensor:
        """Return this rank's block of the sum, with the bias added once."""
        if not self._takes_part:
            return self._outside(input)
        if self._splits_output:
            weight, *bias = self._used(*self._blocks)
        else:
            (weight,) = self._used("weight")
            bias = self._used("bias") if self.use_bias else []
        y = self._summed(input, weight)
        return y + bias[0].to(y.dtype) if bias else y

    def _summed(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return this rank's block of the sum over ranks."""
        if self._plan.comm.size == 1 or not is_plain(x) or self._plan.balance is not None:
            self._answer_first((x,))
            return self._scattered(x, weight)

        @torch.no_grad()
        def start(fits: bool) -> Product:
            fits = fits and self._plan.balance is None
            return Product(F.linear(x, weight) if fits else None)

        product = self._under_way(start, (x,))
        if self._plan.balance is not None:  # ranks have found that by now
            return self._scattered(x, weight)
        return Rows.apply(self._tied(x), weight, self._plan, product.partial)

    def _scattered(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return this rank's block step by step: balanced features, a product, the sum."""
        held = self._tied(x)
        if self._exchange is not None:
            held = HaloExchange.apply(held, self._exchange)
        partial = F.linear(held, weight)
        return partial if self._plan.comm.size == 1 else ReduceScatter.apply(partial, self._plan)


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
