"""Arithmetic of one dim of a transposed convolution: which inputs a share of the outputs needs.

A transposed convolution spreads input `i` over outputs `[s * i - p, s * i - p + d * (k - 1) + 1)`.
No torch and no process here.
"""

from __future__ import annotations

from unisono.errors import PartitionError
from unisono.topology.decompose import Interval
from unisono.topology.window import Segment, span

__all__ = ["transposed_cover", "transposed_length", "transposed_needed", "transposed_window"]


def transposed_length(
    x: int, k: int, s: int = 1, p: int = 0, d: int = 1, output_padding: int = 0
) -> int:
    """Return the output length of a transposed convolution of `x` points.

    >>> transposed_length(5, 3, 2, 1, output_padding=1)
    10
    """
    asked = f"kernel {k}, stride {s}, padding {p}, dilation {d}, output padding {output_padding}"
    if min(k, s, d) < 1 or min(p, output_padding, x) < 0:
        raise PartitionError.because(
            f"{asked} on {x} points",
            arithmetic="kernel, stride, dilation >= 1; padding, output padding, points >= 0",
            hint="check the sign of each number",
        )
    if output_padding and output_padding >= max(s, d):
        raise PartitionError.because(
            asked,
            arithmetic=f"output padding >= max(stride, dilation): {output_padding} >= {max(s, d)}",
            hint=f"output_padding of at most {max(s, d) - 1}",
        )
    if x == 0:
        return 0
    length = (x - 1) * s - 2 * p + span(k, d) + output_padding
    if length < 1:
        raise PartitionError.because(
            f"{asked} on {x} points",
            arithmetic=f"(X-1)s - 2p + K + o = "
            f"{(x - 1) * s} - {2 * p} + {span(k, d)} + {output_padding} = {length} < 1",
            hint="less padding",
        )
    return length


def transposed_needed(
    y0: int, y1: int, x: int, k: int, s: int = 1, p: int = 0, d: int = 1
) -> Interval:
    """Return the inputs that reach outputs `[y0, y1)`; empty intervals start where they stop.

    >>> transposed_needed(5, 10, 5, 3, 2, 1)
    (2, 5)
    """
    if y0 >= y1:
        return 0, 0
    start = max(0, -(-(y0 + p - d * (k - 1)) // s))
    stop = min(x, (y1 - 1 + p) // s + 1)
    return (start, stop) if start < stop else (start, start)


def transposed_window(
    y0: int, y1: int, x: int, k: int, s: int = 1, p: int = 0, d: int = 1
) -> tuple[Segment, ...]:
    """Return the window of outputs `[y0, y1)` as segments for `halo.plan_windows`: copies only."""
    start, stop = transposed_needed(y0, y1, x, k, s, p, d)
    return (Segment((0, stop - start), (start, stop), "copy"),) if start < stop else ()


def transposed_cover(needed: Interval, k: int, s: int = 1, p: int = 0, d: int = 1) -> Interval:
    """Return the outputs that a local transposed convolution (padding 0) of `needed` writes.

    May reach beyond the share, where it must be cut, or stop short of it, where the output is zero.
    """
    start, stop = needed
    first = s * start - p
    return (first, s * (stop - 1) - p + span(k, d)) if start < stop else (first, first)
