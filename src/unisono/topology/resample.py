"""Arithmetic of one dim of upsampling: taps, weights, and which inputs a share of outputs needs.

Every output is a weighted sum of one (nearest), two (linear) or four (cubic) inputs. The rules are
those of `torch.nn.functional.interpolate`. No torch and no process here.
"""

from __future__ import annotations

import ctypes
import math
from functools import lru_cache
from typing import NamedTuple

from unisono.errors import PartitionError
from unisono.topology.decompose import Interval
from unisono.topology.window import Segment, copied

RESAMPLE_MODES: tuple[str, ...] = ("nearest", "nearest-exact", "linear", "cubic")
"""One-dim kernels; bilinear and trilinear are "linear" in each dim, bicubic is "cubic"."""

_CUBIC = -0.75


class Taps(NamedTuple):
    """Inputs of one output and their weights."""

    points: tuple[int, ...]
    """Input positions, ascending; at the ends a position may stand there twice."""
    weights: tuple[float, ...]
    """One weight per point; they add up to 1."""


def resample_length(x: int, *, size: int | None = None, scale: float | None = None) -> int:
    """Return the output length: `size`, or `floor(x * scale)`; exactly one of the two is given.

    >>> resample_length(5, scale=1.5)
    7
    """
    if (size is None) == (scale is None):
        raise PartitionError.because(
            f"upsampling with size={size}, scale={scale}",
            hint="give exactly one of size and scale_factor",
        )
    length = size if size is not None else math.floor(x * (scale or 0.0))
    if length < 1:
        raise PartitionError.because(
            f"upsampling {x} points with size={size}, scale={scale}",
            arithmetic=f"output length {length} < 1",
            hint="a larger size or scale_factor",
        )
    return length


def resample_taps(
    j: int,
    x: int,
    y: int,
    mode: str,
    *,
    scale: float | None = None,
    align_corners: bool = False,
    double: bool = False,
) -> Taps:
    """Return inputs and weights of output `j` when `x` points become `y`.

    Args:
        j: output position in the whole dim.
        x: input length of the whole dim, at least 1.
        y: output length of the whole dim.
        mode: one of `RESAMPLE_MODES`.
        scale: the factor, if the user gave one; None stands for `y / x`.
        align_corners: first and last points fall on each other (linear and cubic only).
        double: the nearest point as torch finds it for float64 values; else as for all others.
    """
    _check(x, y, mode, align_corners)
    if mode in ("nearest", "nearest-exact"):
        return Taps((_nearest(j, x, y, mode, scale, double),), (1.0,))
    step = 1.0 / scale if scale else x / y
    if mode == "linear" and x == y:
        t = float(j)  # torch copies then, whatever the factor was
    elif align_corners:
        t = j * ((x - 1) / (y - 1)) if y > 1 else 0.0
    else:
        t = (j + 0.5) * step - 0.5
        t = max(0.0, t) if mode == "linear" else t
    left = math.floor(t)
    if mode == "linear":
        left = min(left, x - 1)
        weight = min(t - left, 1.0)
        return Taps((left, min(left + 1, x - 1)), (1.0 - weight, weight))
    weight = t - left
    points = tuple(min(max(left + i, 0), x - 1) for i in (-1, 0, 1, 2))
    return Taps(points, tuple(_cubic(abs(weight - i)) for i in (-1, 0, 1, 2)))


@lru_cache(4096)
def resample_needed(
    y0: int,
    y1: int,
    x: int,
    y: int,
    mode: str,
    *,
    scale: float | None = None,
    align_corners: bool = False,
    double: bool = False,
) -> Interval:
    """Return the inputs from the first tap of output `y0` to the last of `y1 - 1`."""
    if y0 >= y1:
        return 0, 0
    first, last = (
        resample_taps(j, x, y, mode, scale=scale, align_corners=align_corners, double=double)
        for j in (y0, y1 - 1)
    )
    return first.points[0], last.points[-1] + 1


def resample_window(
    y0: int,
    y1: int,
    x: int,
    y: int,
    mode: str,
    *,
    scale: float | None = None,
    align_corners: bool = False,
    double: bool = False,
) -> tuple[Segment, ...]:
    """Return the window of outputs `[y0, y1)` as segments for `halo.plan_windows`: one copy."""
    options = {"scale": scale, "align_corners": align_corners, "double": double}
    return copied(*resample_needed(y0, y1, x, y, mode, **options))


def _nearest(j: int, x: int, y: int, mode: str, scale: float | None, double: bool) -> int:
    """Return the source of `j`, rounded as torch rounds it: in float32 unless values are float64.

    The last step before the floor is in float32 in any case.
    """
    rounded = float if double else _float32
    step = rounded(1.0 / scale if scale else x / y)
    at = j * step
    if mode == "nearest-exact":  # through the centres of points, with one rounding
        at = max(0.0, rounded((j + 0.5) * step - 0.5)) + 0.5
    return min(math.floor(_float32(at)), x - 1)


def _cubic(distance: float) -> float:
    a, u = _CUBIC, distance
    if u <= 1.0:
        return ((a + 2.0) * u - (a + 3.0)) * u * u + 1.0
    return ((a * u - 5.0 * a) * u + 8.0 * a) * u - 4.0 * a


def _float32(value: float) -> float:
    return ctypes.c_float(value).value


def _check(x: int, y: int, mode: str, align_corners: bool) -> None:
    if mode not in RESAMPLE_MODES:
        raise PartitionError.because(
            f"upsampling mode {mode!r}", hint=f"one of {', '.join(map(repr, RESAMPLE_MODES))}"
        )
    if align_corners and mode.startswith("nearest"):
        raise PartitionError.because(
            f"align_corners=True with mode {mode!r}",
            hint='align_corners needs mode "linear" or "cubic"',
        )
    if x < 1 or y < 1:
        raise PartitionError.because(
            f"upsampling {x} points to {y}",
            arithmetic=f"{min(x, y)} < 1",
            hint="lengths of at least 1",
        )
