"""Weighted sums of the points of a window: the interpolation of a block, one dim at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce

import torch
from torch import Tensor

from unisono.accelerator import copied_once
from unisono.topology.resample import Resampling

MODES = {
    "nearest": "nearest",
    "nearest-exact": "nearest-exact",
    "linear": "linear",
    "bilinear": "linear",
    "trilinear": "linear",
    "bicubic": "cubic",
}
"""torch's modes -> the kernel in each dim."""


@dataclass(frozen=True)
class Taps:
    """Which points of a window make each output of one dim, and their weights."""

    points: tuple[tuple[int, ...], ...]
    """For each tap, its position in the window for every output."""
    weights: tuple[tuple[float, ...], ...]

    @cached_property
    def _tensors(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """The same as tensors, one pair a tap."""
        with torch.inference_mode(False):  # kept, and used where gradients are wanted
            return tuple(
                (
                    torch.tensor(points, dtype=torch.long, device="cpu"),
                    torch.tensor(weights, dtype=torch.float64, device="cpu"),
                )
                for points, weights in zip(self.points, self.weights, strict=True)
            )

    def resampled(self, x: Tensor, dim: int) -> Tensor:
        """Return the weighted sums of points of a window along a dim."""
        shape = [-1 if d == dim else 1 for d in range(x.dim())]
        parts: list[Tensor] = []
        for points, weights in self._tensors:
            part = x.index_select(dim, copied_once(points, x.device))
            if len(self.points) > 1:
                part = part * copied_once(weights, x.device, x.dtype).view(shape)
            parts.append(part)
        return reduce(torch.add, parts)


@lru_cache(1024)
def taps_of(how: Resampling, y0: int, y1: int, start: int) -> Taps:
    """Return the taps of outputs `[y0, y1)` of one dim, for a window that begins at `start`."""
    found = [how.taps(j) for j in range(y0, y1)]
    count = len(found[0].points) if found else 1
    return Taps(
        tuple(tuple(t.points[k] - start for t in found) for k in range(count)),
        tuple(tuple(t.weights[k] for t in found) for k in range(count)),
    )


def resampled(window: Tensor, taps: Sequence[Taps]) -> Tensor:
    """Return the weighted sums of taps, one spatial dim after the other."""
    for dim, own in enumerate(taps, 2):
        window = own.resampled(window, dim)
    return window
