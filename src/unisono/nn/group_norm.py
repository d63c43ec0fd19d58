"""Group normalisation over split space: moments of all ranks that share a sample's channels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unisono.comm import Communicator
from unisono.errors import PartitionError
from unisono.nn.channels import ChannelMove, balanced_channels, channel_move
from unisono.nn.parameters import (
    Holding,
    Weights,
    check_weights,
    nothing,
    replicated_or_root,
)
from unisono.nn.state import HoldingModule
from unisono.nn.statistics import merged_moments, own_moments
from unisono.nn.structure import Table
from unisono.topology import Partition
from unisono.topology.decompose import block, split_cuts

__all__ = ["DistributedGroupNorm"]


@dataclass(frozen=True)
class GroupNormPlan:
    """What a rank does: its groups, and with whom it shares them."""

    comm: Communicator
    """Ranks that hold other points of this rank's samples and channels."""
    counts: list[int]
    """Values of a group on each of them."""
    total: int
    """Values of a group on all of them."""
    own: int
    """Values of a group here."""
    groups: int
    """Of this rank."""
    global_shape: tuple[int, ...]
    move: ChannelMove | None = None
    """Where channels are not in balanced blocks."""


class DistributedGroupNorm(HoldingModule[GroupNormPlan]):
    """`torch.nn.GroupNorm` of a tensor `(N, C, ...)` split in any dims, between groups in dim 1.

    Args:
        P_x: partition of the input; dim 1 splits the channels, and balanced blocks of them must be
            whole groups. Channels in other blocks are moved there and back.
        num_groups: groups of the whole tensor.
        num_channels: channels of the whole tensor.
        eps: added to the variance.
        affine: learn a scale and a shift for each channel.
        bias: False leaves out the shift.
    """

    def __init__(
        self,
        P_x: Partition,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        weights: Weights = "replicated",
    ) -> None:
        super().__init__()
        self.P_x = P_x
        self.num_groups = num_groups
        self.num_channels = num_channels
        self.eps = eps
        self.affine = affine
        self.weights: Weights = check_weights(weights)
        self._check_groups()
        used = stored = nothing((num_channels,))
        if P_x.active and P_x.index is not None:
            c0, c1 = block(num_channels, P_x.shape[1], P_x.index[1])
            used = Holding((num_channels,), (c0,), (c1 - c0,))
            if weights == "replicated" or not any((P_x.index[0], *P_x.index[2:])):
                stored = used
        self._block = used.shape
        self.weight = self.bias = None
        if affine:
            self.weight = nn.Parameter(torch.ones(stored.shape, dtype=dtype, device=device))
            if bias:
                self.bias = nn.Parameter(torch.zeros(stored.shape, dtype=dtype, device=device))
        for name in ("weight", "bias"):
            is_whole = self._is_everywhere and weights == "replicated"
            self._hold(name, stored, replicated=is_whole)

    @property
    def _is_everywhere(self) -> bool:
        """Whether every rank uses all channels."""
        return self.P_x.shape[1] == 1 and self.P_x.size == self.P_x.root.size

    def _check_groups(self) -> None:
        name, P = type(self).__name__, self.P_x
        if P.dim < 2:
            raise PartitionError.because(
                f"{name} on {P!r}",
                f"{P.dim} dims",
                "needs 2 or more",
                "Partition([2, 1, 1]): batch, channels, then space",
            )
        asked = f"{name}(num_groups={self.num_groups}, num_channels={self.num_channels})"
        if self.num_groups < 1 or self.num_channels % self.num_groups:
            raise PartitionError.because(
                asked,
                f"{self.num_channels} channels in {self.num_groups} equal groups",
                "the channels do not divide evenly",
                f"num_groups={math.gcd(max(self.num_groups, 1), self.num_channels)}",
            )
        width = self.num_channels // self.num_groups
        cuts = split_cuts(self.num_channels, P.shape[1])
        inside = next((cut for cut in cuts if width and cut % width), None)
        if inside is not None:
            raise PartitionError.because(
                f"{asked} on {P!r}",
                f"channels cut at {list(cuts)}, groups of {width}",
                f"the cut at {inside} lies inside a group: {inside} % {width} = {inside % width}",
                f"a number of ranks along dim 1 that divides {self.num_groups}, or 1",
            )

    def _describe(self) -> tuple[object, ...]:
        flags = (self.eps, self.weight is not None, self.bias is not None, self.weights)
        return (self.P_x, self.num_groups, self.num_channels, *flags)

    def _make_plan(self, tables: Sequence[Table]) -> GroupNormPlan:
        (table,) = tables
        table.dtype(self.P_x)
        cuts = table.cuts(self.P_x)
        shape = tuple(own[-1] for own in cuts)
        balanced = balanced_channels(type(self).__name__, self.num_channels, self.P_x, cuts)
        same = self.P_x.sub(tuple(range(2, self.P_x.dim)))
        width = self.num_channels // self.num_groups
        counts = [width * math.prod(table.of(rank).shape[2:]) for rank in same.ranks]
        index = self.P_x.index
        channels = 0 if index is None else balanced[index[1] + 1] - balanced[index[1]]
        own = counts[same.rank or 0]
        return GroupNormPlan(
            same.comm, counts, sum(counts), own, channels // max(width, 1), shape,
            channel_move(self.P_x, cuts),
        )  # fmt: skip

    def _users(self) -> Partition:
        """Return the ranks that hold this rank's block of weight and bias."""
        return self.P_x.sub(tuple(dim for dim in range(self.P_x.dim) if dim != 1))

    def _gradient_comm(self, name: str) -> Communicator | None:  # noqa: ARG002
        return self._users().comm if self.P_x.active and self.weights == "replicated" else None

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised block."""
        if not self._takes_part:
            return self._outside(input)
        move = self._plan.move
        if move is None:
            return self._normalised_block(input)
        return move.around(self._normalised_block, self._tied(input))

    def _normalised_block(self, x: Tensor) -> Tensor:
        """Return the block of own channels, balanced as the parameters are."""
        plan = self._plan
        if plan.global_shape[0] * plan.total == 1:
            self._refuse_one_value("a larger batch, fewer groups, or a larger image")
        y, _, _ = self._normalised(self._wide(x))
        return self._scaled(y).to(x.dtype)

    def _refuse_one_value(self, hint: str) -> None:
        raise PartitionError.because(
            f"{type(self).__name__} of {self.num_channels} channels in {self.num_groups} groups",
            f"an input of global shape {list(self._plan.global_shape)}",
            "one value a group: its variance is 0",
            hint,
        )

    def _wide(self, x: Tensor) -> Tensor:
        """Return the input as part of the graph; 16-bit values as float32, for the digits."""
        tied = self._tied(x)
        return tied.float() if tied.dtype in (torch.float16, torch.bfloat16) else tied

    def _normalised(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the own block; mean and sum of squared deviations of whole groups, `(N, g, 1)`."""
        plan = self._plan
        grouped = x.reshape(x.shape[0], plan.groups, plan.own)
        mean, squares = own_moments(grouped, (2,), keepdim=True)
        mean, squares = merged_moments(mean, squares, plan.counts, plan.comm)
        y = (grouped - mean) * torch.rsqrt(squares / max(plan.total, 1) + self.eps)
        return y.reshape(x.shape), mean, squares

    def _scaled(self, y: Tensor) -> Tensor:
        """Return a normalised block with scale and shift of its channels."""
        held = [p for p in (self.weight, self.bias) if p is not None]
        if not held:
            return y
        shape = (1, -1, *(1,) * (y.dim() - 2))
        held = replicated_or_root(
            self._users(), self.weights, [self._block] * len(held), held,
            sums=self._sums_gradients,
        )  # fmt: skip
        y = y * held[0].view(shape)
        return y + held[1].view(shape) if len(held) > 1 else y
