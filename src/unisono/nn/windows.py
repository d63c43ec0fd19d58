"""Windows that are blocks: for dims in which a layer only moves points to other cuts."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.topology.halo import WindowOf
from unisono.topology.window import Segment


def block_windows(cuts: Sequence[int]) -> WindowOf:
    """Return, for the rank at each index of a dim, the window that is its block of `cuts`."""

    def window(i: int) -> tuple[Segment, ...]:
        size = cuts[i + 1] - cuts[i]
        return (Segment((0, size), (cuts[i], cuts[i + 1]), "copy"),) if size else ()

    return window
