"""Windows that are blocks: for dims in which a layer only moves points to other cuts."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.nn.structure import Cuts
from unisono.topology import halo
from unisono.topology.decompose import split_cuts
from unisono.topology.halo import HaloPlan, WindowOf
from unisono.topology.window import Segment


def block_windows(cuts: Sequence[int]) -> WindowOf:
    """Return, for the rank at each index of a dim, the window that is its block of `cuts`."""

    def window(i: int) -> tuple[Segment, ...]:
        size = cuts[i + 1] - cuts[i]
        return (Segment((0, size), (cuts[i], cuts[i + 1]), "copy"),) if size else ()

    return window


def balanced_in(cuts: Cuts, dim: int) -> Cuts:
    """Return the cuts with balanced blocks in one dim."""
    dim %= len(cuts)
    balanced = tuple(split_cuts(cuts[dim][-1], len(cuts[dim]) - 1))
    return (*cuts[:dim], balanced, *cuts[dim + 1 :])


def recut(before: Cuts, after: Cuts, index: Sequence[int]) -> HaloPlan:
    """Return the plan that moves points from blocks of some cuts to those of others."""
    shares = [(own[i], own[i + 1]) for own, i in zip(after, index, strict=True)]
    return halo.plan_windows(before, index, [block_windows(own) for own in after], shares)
