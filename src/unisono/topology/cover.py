"""How a convolution is done without its window: one pass over the own block, and patches.

A convolution is linear. Where torch's own padding lines up with the own outputs, the pass gives all
of them from own points alone; each piece that comes from another rank then adds its part to the
few outputs that read it. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from unisono.topology.decompose import Interval
from unisono.topology.halo import Box, HaloPiece, HaloPlan
from unisono.topology.window import span


@dataclass(frozen=True, slots=True)
class Patch:
    """What one piece of another rank adds: some outputs, from a window with zeros around it."""

    output: Box
    """Which of the own outputs, spatial dims only."""
    window_shape: tuple[int, ...]
    """Sizes of its window in all dims."""
    piece: HaloPiece
    """The piece, placed in that window."""


@dataclass(frozen=True, slots=True)
class Cover:
    """The pass over own points and the patches that make it complete."""

    view: Box
    """Part of the own block that the pass reads, spatial dims only."""
    padding: tuple[int, ...]
    """Zeros on both sides of it."""
    patches: tuple[Patch, ...]
    """One for each piece of the plan's `recvs`, in their order."""
    patched_share: float
    """Outputs computed in patches, as a share of all."""


def cover(
    plan: HaloPlan, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int],
    padding: Sequence[tuple[int, int]],
) -> Cover | None:  # fmt: skip
    """Return how the convolution of a plan is done without its window, None where it cannot be.

    Args:
        plan: of the convolution, for a tensor `(N, C, ...)`.
        kernel: one size per spatial dim; likewise `stride`, `dilation` and `(left, right)` padding.
    """
    share = [(s, s + n) for s, n in zip(plan.output_start, plan.output_shape, strict=True)]
    if list(plan.owned[:2]) != share[:2] or 0 in plan.output_shape or 0 in plan.block_shape:
        return None
    reach = [span(k, d) for k, d in zip(kernel, dilation, strict=True)]
    first = [s * y[0] - p[0] for s, y, p in zip(stride, share[2:], padding, strict=True)]
    # With other padding modes own points may stand in the window twice, or elsewhere.
    is_natural = all(
        set(piece.kinds) == {"copy"}
        and all(
            dest[0] - source[0] == interval[0] - low
            for source, dest, interval, low in zip(
                piece.source[2:], piece.dest[2:], plan.owned[2:], first, strict=True
            )
        )
        for piece in plan.local
    )
    space = plan.output_shape[2:]
    dims = zip(plan.owned[2:], space, first, stride, reach, strict=True)
    passes = [one_pass for dim in dims if (one_pass := _padded(*dim)) is not None]
    if not is_natural or len(passes) < len(space):
        return None
    pieces = [piece for message in plan.recvs for piece in message.pieces]
    patches = tuple(_patch(piece, space, stride, reach) for piece in pieces)
    patched = sum(math.prod(stop - start for start, stop in patch.output) for patch in patches)
    return Cover(
        tuple(view for view, _ in passes),
        tuple(zeros for _, zeros in passes),
        patches,
        patched / math.prod(space),
    )


def _padded(span: Interval, n: int, low: int, s: int, reach: int) -> tuple[Interval, int] | None:
    """Return own points and zeros around them whose convolution gives all `n` outputs of a dim.

    Args:
        span: the own points.
        n: number of own outputs.
        low: first position that they read.
        s: stride.
        reach: positions from the first to the last tap.
    """
    padding = max(span[0] - low, 0)
    start = low + padding
    high = low + s * (n - 1) + reach
    for stop in (span[1], min(high, span[1])):
        if start < stop and (stop - start + 2 * padding - reach) // s + 1 == n:
            return (start - span[0], stop - span[0]), padding
    return None


def _patch(
    piece: HaloPiece, outputs: Sequence[int], stride: Sequence[int], reach: Sequence[int]
) -> Patch:
    """Return the outputs that read a piece, and no fewer than those whose windows contain it."""
    output: list[Interval] = []
    windows: list[Interval] = list(piece.dest[:2])
    for (a, b), n, s, r in zip(piece.dest[2:], outputs, stride, reach, strict=True):
        low = max(0, min(-((r - 1 - a) // s), a // s))
        high = min(n - 1, max((b - 1) // s, -((r - b) // s)))
        output.append((low, high + 1))
        windows.append((s * low, s * high + r))
    placed = tuple((a - low, b - low) for (a, b), (low, _) in zip(piece.dest, windows, strict=True))
    shape = tuple(high - low for low, high in windows)
    return Patch(tuple(output), shape, replace(piece, dest=placed))
