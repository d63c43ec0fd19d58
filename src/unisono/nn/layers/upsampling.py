"""Upsampling of split tensors: torch's `interpolate` on blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from unisono.errors import PartitionError
from unisono.nn.layers.function_layer import FunctionLayer
from unisono.topology import Partition


class DistributedUpsample(FunctionLayer):
    """`torch.nn.Upsample` of a tensor `(N, C, ...)` split in any dims.

    Args:
        P_x: partition of the input.
        size: spatial sizes of the whole output, or
        scale_factor: by how much each spatial dim grows. Exactly one of the two.
        mode: nearest, nearest-exact, linear, bilinear, trilinear, bicubic.
        align_corners: as in torch; not for the nearest modes.
    """

    def __init__(
        self,
        P_x: Partition,
        size: int | Sequence[int] | None = None,
        scale_factor: float | Sequence[float] | None = None,
        mode: str = "nearest",
        align_corners: bool | None = None,
    ) -> None:
        super().__init__()
        self.P_x = P_x
        space = P_x.dim - 2
        self.mode = mode
        self.align_corners = align_corners
        sizes, factors = (
            tuple(value) if isinstance(value, Sequence) else (value,) * space
            for value in (size or (), scale_factor or ())
        )
        self.size = tuple(map(int, sizes)) or None
        self.scale_factor = tuple(map(float, factors)) or None
        try:  # torch says what it does not take
            F.interpolate(torch.empty([2] * P_x.dim, device="meta"), *self._how)
        except (NotImplementedError, RuntimeError, ValueError) as error:
            raise PartitionError.because(
                f"DistributedUpsample(size={size}, scale_factor={scale_factor}, mode={mode!r}, "
                f"align_corners={align_corners})",
                str(error),
                f"{space} spatial dims",
                "arguments that torch.nn.Upsample takes",
            ) from None

    @property
    def _how(self) -> tuple[Any, ...]:
        return self.size, self.scale_factor, self.mode, self.align_corners

    def _check(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:  # noqa: ARG002
        if not dtype.is_floating_point and not self.mode.startswith("nearest"):
            raise PartitionError.because(
                f"{type(self).__name__}(mode={self.mode!r}) of {dtype}",
                "weighted sums are of real floating-point numbers",
                None,
                'x.float(), or mode="nearest"',
            )

    def forward(self, input: Tensor) -> Tensor:
        """Return this rank's balanced share of the upsampled tensor."""
        if not self._takes_part:
            return self._outside(input)
        x = self._tied(input)
        if self._plan.cuts or x.is_floating_point() or x.dtype == torch.uint8:
            return self._called(F.interpolate, x, *self._how)
        # One rank alone calls torch, which resizes no other integers: it resizes their places.
        space = x.shape[2:]
        places = torch.arange(space.numel(), dtype=torch.float64, device=x.device)
        chosen = F.interpolate(places.view(1, 1, *space), *self._how)
        picked = x.flatten(2).index_select(2, chosen.long().flatten())
        return picked.unflatten(2, chosen.shape[2:])
