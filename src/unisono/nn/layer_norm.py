"""Layer normalisation over dims that may be split: moments of all ranks that share a sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from unisono.comm import Communicator
from unisono.errors import PartitionError
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
from unisono.operators import Repartition
from unisono.operators.repartition import RepartitionOnGroup
from unisono.topology import Partition
from unisono.topology.decompose import split_cuts
from unisono.topology.overlap import OverlapPlan, overlaps
from unisono.topology.window import as_int

__all__ = ["DistributedLayerNorm"]


@dataclass(frozen=True)
class _NormPlan:
    comm: Communicator
    """Ranks that share this rank's samples."""
    counts: list[int]
    total: int
    affine: OverlapPlan
    """From balanced blocks of the affine parameters to those of the input."""


class DistributedLayerNorm(HoldingModule[_NormPlan]):
    """`torch.nn.LayerNorm` of a tensor split in any dims.

    Args:
        P_x: partition of the input.
        normalized_shape: sizes of the last dims of the whole tensor.
        eps: added to the variance.
        elementwise_affine: learn a scale, in blocks as the partition's last dims cut it.
        bias: learn a shift too.
    """

    def __init__(
        self,
        P_x: Partition,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        weights: Weights = "replicated",
    ) -> None:
        super().__init__()
        one = as_int(normalized_shape)
        shape = (one,) if one is not None else map(int, cast("Sequence[int]", normalized_shape))
        self.P_x = P_x
        self.normalized_shape = tuple(shape)
        self.eps = eps
        self.elementwise_affine = elementwise_affine
        if not 0 < len(self.normalized_shape) <= P_x.dim:
            raise PartitionError.because(
                f"DistributedLayerNorm(normalized_shape={list(self.normalized_shape)})",
                f"{P_x!r}",
                f"not 0 < {len(self.normalized_shape)} <= {P_x.dim}",
                "sizes of the last dims",
            )
        self.weights: Weights = check_weights(weights)
        holding = stored = nothing(self.normalized_shape)
        if P_x.active and P_x.index is not None:
            own = [
                (cuts[i], cuts[i + 1])
                for cuts, i in zip(self._balanced(), P_x.index[-self._dims :], strict=True)
            ]
            holding = Holding(
                self.normalized_shape, tuple(a for a, _ in own), tuple(b - a for a, b in own)
            )
            if weights == "replicated" or not any(P_x.index[: -self._dims]):
                stored = holding
        self._block = holding.shape
        self.weight = self.bias = None
        if elementwise_affine:
            self.weight = nn.Parameter(torch.ones(stored.shape, dtype=dtype, device=device))
            if bias:
                self.bias = nn.Parameter(torch.zeros(stored.shape, dtype=dtype, device=device))
        everywhere = weights == "replicated" and P_x.size == P_x.root.size and self._is_unsplit
        for name in ("weight", "bias"):
            self._hold(name, stored, replicated=everywhere)

    @property
    def _dims(self) -> int:
        return len(self.normalized_shape)

    @property
    def _is_unsplit(self) -> bool:
        return math.prod(self.P_x.shape[-self._dims :]) == 1

    def _balanced(self) -> list[tuple[int, ...]]:
        """Return the cuts of the affine parameters."""
        return [
            split_cuts(n, parts)
            for n, parts in zip(self.normalized_shape, self.P_x.shape[-self._dims :], strict=True)
        ]

    def _describe(self) -> tuple[object, ...]:
        flags = (self.eps, self.weight is not None, self.bias is not None, self.weights)
        return (self.P_x, self.normalized_shape, *flags)

    def _make_plan(self, tables: Sequence[Table]) -> _NormPlan:
        (table,) = tables
        table.dtype(self.P_x)
        cuts = table.cuts(self.P_x)
        found = tuple(own[-1] for own in cuts[-self._dims :])
        if found != self.normalized_shape:
            raise PartitionError.because(
                f"DistributedLayerNorm(normalized_shape={list(self.normalized_shape)})",
                f"an input of global shape {[own[-1] for own in cuts]}",
                f"{list(found)} != {list(self.normalized_shape)}",
                f"normalized_shape={list(found)}",
            )
        axes = tuple(range(self.P_x.dim - self._dims, self.P_x.dim))
        same = self.P_x.sub(axes)
        counts = [math.prod(table.of(rank).shape[-self._dims :]) for rank in same.ranks]
        moved = overlaps(
            self._balanced(), same.ranks, cuts[-self._dims :], same.ranks, self.P_x.root.rank
        )
        return _NormPlan(same.comm, counts, sum(counts), moved)

    def _samples(self) -> Partition:
        """Return the ranks that hold this rank's block of the affine parameters."""
        return self.P_x.sub(tuple(range(self.P_x.dim - self._dims)))

    def _gradient_comm(self, name: str) -> Communicator | None:  # noqa: ARG002
        return self._samples().comm if self.P_x.active and self.weights == "replicated" else None

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised block."""
        if not self._takes_part:
            return self._outside(input)
        plan = self._plan
        tied = self._tied(input)
        wide = tied.float() if tied.dtype in (torch.float16, torch.bfloat16) else tied
        dims = tuple(range(input.dim() - self._dims, input.dim()))
        mean, squares = own_moments(wide, dims, keepdim=True)
        mean, squares = merged_moments(mean, squares, plan.counts, plan.comm)
        y = (wide - mean) * torch.rsqrt(squares / max(plan.total, 1) + self.eps)
        held = [p for p in (self.weight, self.bias) if p is not None]
        if held:
            held = replicated_or_root(
                self._samples(), self.weights, [self._block] * len(held), held,
                sums=self._sums_gradients,
            )  # fmt: skip
        if held:
            y = y * self._moved(held[0])
        if len(held) > 1:
            y = y + self._moved(held[1])
        return y.to(input.dtype)

    def _moved(self, parameter: Tensor) -> Tensor:
        """Return an affine parameter in the blocks of the input."""
        overlap = self._plan.affine
        if overlap.is_identity:
            return parameter
        after = overlap.dest_shape or (0,)
        plan = RepartitionOnGroup(self.P_x.root, overlap, tuple(parameter.shape), after)
        return Repartition.apply(parameter, plan)
