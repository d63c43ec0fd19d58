"""A machine as the planner sees it: nodes, ranks, cores and the links between them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from unisono.errors import PlatformError
from unisono.plan.links import (
    Link,
    all_gather,
    all_reduce,
    all_reduce_between,
    all_reduce_ring,
    all_reduce_tree,
    contention,
    slower_of,
)

__all__ = ["ALGORITHMS", "Cluster", "Sum"]

ALGORITHMS = ("auto", "ring", "tree", "hierarchical")
"""Ways to add gradients over all ranks; `auto` is the fastest of the others."""


class Sum(NamedTuple):
    """What an all-reduce over all ranks costs."""

    seconds: float
    free_s: float
    """Seconds of it in which the rank could compute."""
    algorithm: str


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal nodes with the same number of ranks each."""

    nodes: int
    """How many."""
    ranks_per_node: int
    """Ranks on each."""
    inner: Link
    """Between ranks of a node."""
    outer: Link
    """Between nodes: one link a node, which its ranks share."""
    cores_per_node: int | None = None
    """Cores for the ranks of a node; None: as many as they need."""
    rank_speed: float = 1.0
    """How many times as fast a rank computes as one core of the machine that was measured."""
    slowdown: Mapping[int, float] = field(default_factory=dict)
    """Measured: how much longer a rank computes when so many work on the node at once."""
    algorithm: str = "auto"
    """How gradients are added over all ranks; see `ALGORITHMS`."""

    def __post_init__(self) -> None:
        if min(self.nodes, self.ranks_per_node) < 1 or self.algorithm not in ALGORITHMS:
            raise PlatformError.because(
                f"Cluster(nodes={self.nodes}, ranks_per_node={self.ranks_per_node}, "
                f"algorithm={self.algorithm!r})",
                "at least one node and one rank, and a known algorithm",
                hint=f"algorithm: {', '.join(ALGORITHMS)}",
            )

    @property
    def ranks(self) -> int:
        """Ranks in all."""
        return self.nodes * self.ranks_per_node

    def sized(self, ranks: int) -> Cluster:
        """Return the same machine with so many ranks: full nodes, or a part of one."""
        per_node = min(ranks, self.ranks_per_node)
        return replace(self, nodes=-(-ranks // per_node), ranks_per_node=per_node)

    @property
    def node_link(self) -> Link:
        """The link inside a node, as its ranks find it when all use it at once."""
        return self.inner.among(self.ranks_per_node, self.cores_per_node)

    @property
    def network(self) -> Link:
        """What messages along a chain of all ranks find: the slower of the links they pass."""
        if self.nodes == 1:
            return self.node_link
        return self.outer if self.ranks_per_node == 1 else slower_of(self.node_link, self.outer)

    def compute(self, seconds: float) -> float:
        """Return how long computing takes here that took `seconds` on one core alone."""
        factor = contention(self.slowdown, self.ranks_per_node, self.cores_per_node)
        return seconds * factor / self.rank_speed

    def all_reduce(self, nbytes: float) -> Sum:
        """Return what a sum over all ranks costs."""
        if self.ranks == 1:
            return Sum(0.0, 0.0, "-")
        link = self.network
        if self.nodes == 1:
            seconds = all_reduce(nbytes, self.ranks, link)
            return Sum(seconds, link.overlap * seconds, "direct" if link.direct else "ring")
        sums = [self._hierarchical(nbytes)]
        for name, formula in (("ring", all_reduce_ring), ("tree", all_reduce_tree)):
            seconds = formula(nbytes, self.ranks, link)
            sums.append(Sum(seconds, link.overlap * seconds, name))
        if self.algorithm == "auto":
            return min(sums)
        return next(each for each in sums if each.algorithm == self.algorithm)

    def all_gather(self, nbytes: float) -> Sum:
        """Return what joining `nbytes` in all costs; a reduce-scatter costs the same."""
        if self.ranks == 1:
            return Sum(0.0, 0.0, "-")
        seconds = all_gather(nbytes, self.ranks, self.network)
        flat = Sum(seconds, self.network.overlap * seconds, "ring")
        if self.nodes == 1:
            return flat
        inside = all_gather(nbytes, self.ranks_per_node, self.node_link)
        between = all_gather(nbytes, self.nodes, self.outer)
        free = self.node_link.overlap * inside + self.outer.overlap * between
        return min(flat, Sum(inside + between, free, "hierarchical"))

    def _hierarchical(self, nbytes: float) -> Sum:
        """Return a sum in each node, then between nodes, where other links hide other shares."""
        inside = 2 * all_gather(nbytes, self.ranks_per_node, self.node_link)
        between = all_reduce_between(nbytes, self.nodes, self.outer)
        free = self.node_link.overlap * inside + self.outer.overlap * between
        return Sum(inside + between, free, "hierarchical")
