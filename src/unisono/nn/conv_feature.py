"""Convolutions split in space (and batch): halos from neighbours, then torch's convolution."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.comm import Communicator
from unisono.errors import PartitionError
from unisono.nn.conv_base import ConvBase
from unisono.nn.conv_overlap import SpacePlan
from unisono.nn.conv_settings import Overlap, Size
from unisono.nn.parameters import (
    Weights,
    draw_weight_and_bias,
    nothing,
    replicated_or_root,
    whole,
)
from unisono.nn.structure import Table
from unisono.operators.halo import HaloOnGroup
from unisono.topology import Partition

__all__ = ["DistributedFeatureConv1d", "DistributedFeatureConv2d", "DistributedFeatureConv3d"]


class _FeatureConv(ConvBase[SpacePlan]):
    """A convolution whose input and output are split in batch and space, not in channels."""

    def __init__(
        self,
        P_x: Partition,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size | str = 0,
        padding_mode: str = "zeros",
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
        overlap: Overlap = "auto",
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        weights: Weights = "replicated",
    ) -> None:
        super().__init__()
        name = type(self).__name__
        if P_x.dim != self.dims + 2 or P_x.shape[1] != 1:
            raise PartitionError.because(
                f"{name} on {P_x!r}",
                f"{P_x.dim} dims, {P_x.shape[1] if P_x.dim > 1 else '?'} in channels",
                f"needs {self.dims + 2} dims with 1 in dim 1",
                f"Partition([1, 1, {', '.join(['2'] * self.dims)}])",
            )
        self.P_x = P_x
        self._settle(
            in_channels, out_channels, kernel_size, stride, padding, padding_mode, dilation,
            groups, bias, overlap, weights,
        )  # fmt: skip
        shape = self.settings.weight_shape
        holds = P_x.active and (weights == "replicated" or P_x.rank == 0)
        held = whole if holds else nothing
        self.weight, self.bias = draw_weight_and_bias(
            P_x.comm if P_x.active else None,
            held(shape),
            held(shape[:1]) if bias else None,
            dtype=dtype,
            device=device,
        )
        everywhere = weights == "replicated" and P_x.size == P_x.root.size
        self._hold("weight", held(shape), replicated=everywhere)
        if bias:
            self._hold("bias", held(shape[:1]), replicated=everywhere)

    def _describe(self) -> tuple[object, ...]:
        return (self.P_x, self.settings, self.use_bias, self.weights)

    def _make_plan(self, tables: Sequence[Table]) -> SpacePlan:
        (table,) = tables
        table.dtype(self.P_x)
        cuts = table.cuts(self.P_x)
        self._check_channels(cuts)
        index = self.P_x.index
        if index is None:  # a rank outside never plans
            raise PartitionError(f"{self.P_x!r} has no place for this rank")
        return self._space_plan(self._halo_at(cuts, index), self.P_x.ranks)

    def _space(self) -> SpacePlan:
        return self._plan

    def _halo(self) -> HaloOnGroup | None:
        return self._on_ranks(self._plan.exchange.halo, self.P_x.ranks)

    def _parameters_here(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias for this rank's share; gradients are summed over ranks."""
        shape = self.settings.weight_shape
        held, shapes = [self.weight], [shape]
        if self.bias is not None:
            held.append(self.bias)
            shapes.append(shape[:1])
        w, *b = replicated_or_root(self.P_x, self.weights, shapes, held, sums=self._sums_gradients)
        return w, b[0] if b else None

    def _gradient_comm(self, name: str) -> Communicator | None:  # noqa: ARG002
        return self.P_x.comm if self.P_x.active and self.weights == "replicated" else None

    def forward(self, input: Tensor) -> Tensor:
        """Return this rank's balanced share of the convolution."""
        if not self._takes_part:
            return self._outside(input)
        weight, bias = self._parameters_here()
        return self._in_space(input, weight, bias)


class DistributedFeatureConv1d(_FeatureConv):
    """`torch.nn.Conv1d` of a tensor `(N, C, L)` split in N and L."""

    dims = 1


class DistributedFeatureConv2d(_FeatureConv):
    """`torch.nn.Conv2d` of a tensor `(N, C, H, W)` split in N, H and W."""

    dims = 2


class DistributedFeatureConv3d(_FeatureConv):
    """`torch.nn.Conv3d` of a tensor `(N, C, D, H, W)` split in N, D, H and W."""

    dims = 3
