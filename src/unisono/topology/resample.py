"""Arithmetic of one dim of upsampling: taps, weights, and which inputs a share of outputs needs.

Every output is a weighted sum of one (nearest), two (linear) or four (cubic) inputs. The rules are
those of `torch.nn.functional.interpolate`. No torch and no process here.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from unisono.errors import PartitionError
from unisono.topology.decompose import Interval
from unisono.topology.window import Segment, copied

RESAMPLE_MODES: tuple[str, ...] = ("nearest", "nearest-exact", "linear", "cubic")
"""One-dim kernels; bilinear and trilinear are "linear" in each dim, bicubic is "cubic"."""

_CUBIC = -0.75


class WeightedPoints(NamedTuple):
    """Inputs of one output and their weights."""

    points: tuple[int, ...]
    """Input positions, ascending; at the ends a position may stand there twice."""
    weights: tuple[float, ...]
    """One weight per point; they add up to 1."""


@dataclass(frozen=True)
class Resampling:
    """How one dim of `x` points becomes `y`."""

    x: int
    """Input length of the whole dim, at least 1."""
    y: int
    """Output length of the whole dim, at least 1."""
    mode: str
    """One of `RESAMPLE_MODES`."""
    scale: float | None = None
    """The factor, if the user gave one; None stands for `y / x`."""
    align_corners: bool = False
    """First and last points fall on each other (linear and cubic only)."""
    double: bool = False
    """The nearest point as torch finds it for float64 values; else as for all others."""

    def __post_init__(self) -> None:
        if self.mode not in RESAMPLE_MODES:
            raise PartitionError.because(
                f"upsampling mode {self.mode!r}",
                hint=f"one of {', '.join(map(repr, RESAMPLE_MODES))}",
            )
        if self.align_corners and self.mode.startswith("nearest"):
            raise PartitionError.because(
                f"align_corners=True with mode {self.mode!r}",
                hint='align_corners needs mode "linear" or "cubic"',
            )
        if self.x < 1 or self.y < 1:
            raise PartitionError.because(
                f"upsampling {self.x} points to {self.y}",
                arithmetic=f"{min(self.x, self.y)} < 1",
                hint="lengths of at least 1",
            )

    def taps(self, j: int) -> WeightedPoints:
        """Return inputs and weights of output `j`, counted in the whole dim."""
        x, y = self.x, self.y
        if self.mode.startswith("nearest"):
            return WeightedPoints((_nearest(self, j),), (1.0,))
        step = 1.0 / self.scale if self.scale else x / y
        if self.mode == "linear" and x == y:
            t = float(j)  # torch copies then, whatever the factor was
        elif self.align_corners:
            t = j * ((x - 1) / (y - 1)) if y > 1 else 0.0
        else:
            t = (j + 0.5) * step - 0.5
            t = max(0.0, t) if self.mode == "linear" else t
        left = math.floor(t)
        if self.mode == "linear":
            left = min(left, x - 1)
            weight = min(t - left, 1.0)
            return WeightedPoints((left, min(left + 1, x - 1)), (1.0 - weight, weight))
        weight = t - left
        points = tuple(min(max(left + i, 0), x - 1) for i in (-1, 0, 1, 2))
        return WeightedPoints(points, tuple(_cubic(abs(weight - i)) for i in (-1, 0, 1, 2)))

    def needed(self, y0: int, y1: int) -> Interval:
        """Return the inputs from the first tap of output `y0` to the last of `y1 - 1`."""
        return _needed(self, y0, y1)

    def window(self, y0: int, y1: int) -> tuple[Segment, ...]:
        """Return the window of outputs `[y0, y1)` as segments for `halo.plan_windows`: one copy."""
        return copied(*_needed(self, y0, y1))


@lru_cache(4096)
def _needed(how: Resampling, y0: int, y1: int) -> Interval:
    return (how.taps(y0).points[0], how.taps(y1 - 1).points[-1] + 1) if y0 < y1 else (0, 0)


def _nearest(how: Resampling, j: int) -> int:
    """Return the source of `j`, rounded as torch rounds it: in float32 unless values are float64.

    The last step before the floor is in float32 in any case.
    """
    rounded = float if how.double else _float32
    step = rounded(1.0 / how.scale if how.scale else how.x / how.y)
    at = j * step
    if how.mode == "nearest-exact":  # through the centres of points, with one rounding
        at = max(0.0, rounded((j + 0.5) * step - 0.5)) + 0.5
    return min(math.floor(_float32(at)), how.x - 1)


def _cubic(distance: float) -> float:
    a, u = _CUBIC, distance
    if u <= 1.0:
        return ((a + 2.0) * u - (a + 3.0)) * u * u + 1.0
    return ((a * u - 5.0 * a) * u + 8.0 * a) * u - 4.0 * a


def _float32(value: float) -> float:
    return ctypes.c_float(value).value
