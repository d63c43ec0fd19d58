"""A machine as the planner sees it: links, what collectives cost over them, nodes and ranks. Pure.

`n` bytes over a link take `latency_s + n / bytes_per_s`. Collectives are sums of such messages, as
the usual algorithms send them; one rank alone sends nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from unisono.errors import PlatformError


@dataclass(frozen=True, kw_only=True)
class Link:
    """A way between ranks."""

    name: str
    """For people."""
    latency_s: float
    """Time of a message without content."""
    bytes_per_s: float
    """Bandwidth of one direction."""
    overlap: float = 1.0
    """Share of a message's time in which the rank can compute: 0 if its core moves the bytes."""
    direct: bool = False
    """Whether ranks read each other's memory: all at once, no ring."""
    on_cores: bool = False
    """Whether cores move the bytes, so that ranks that share a core slow each other down."""
    slowdown: Mapping[int, float] = field(default_factory=dict)
    """Measured: by ranks of a node, how much less bandwidth each has, compared with two."""

    def __post_init__(self) -> None:
        if not (self.latency_s >= 0 and self.bytes_per_s > 0 and 0 <= self.overlap <= 1):
            raise PlatformError.because(
                f"Link(name={self.name!r}, latency_s={self.latency_s}, "
                f"bytes_per_s={self.bytes_per_s}, overlap={self.overlap})",
                hint="a latency of 0 or more, a bandwidth above 0, an overlap from 0 to 1",
            )

    def among(self, ranks: int, cores: int | None) -> Link:
        """Return the link as `ranks` of a node with these cores find it, all using it at once."""
        if not self.on_cores:
            return self
        factor = contention(self.slowdown, ranks, cores)
        return replace(self, bytes_per_s=self.bytes_per_s / factor)

    def message(self, nbytes: float) -> float:
        """Return the seconds of one message."""
        return self.latency_s + nbytes / self.bytes_per_s


def slower_of(a: Link, b: Link) -> Link:
    """Return the link that a chain of messages over both behaves like."""
    return Link(
        name=f"{a.name} and {b.name}",
        latency_s=max(a.latency_s, b.latency_s),
        bytes_per_s=min(a.bytes_per_s, b.bytes_per_s),
        overlap=min(a.overlap, b.overlap),
    )


def contention(measured: Mapping[int, float], ranks: int, cores: int | None) -> float:
    """Return by what factor something takes longer when `ranks` do it at once on `cores`.

    Measured factors count; between two of them the line, beyond the last it grows with the ranks a
    core has to serve. Without any, ranks take turns on cores and do not disturb each other else.

    >>> contention({}, 4, 2), contention({2: 1.1, 4: 2.3}, 3, 2), contention({4: 2.3}, 8, 2)
    (2.0, 1.7, 4.6)
    """
    factors = {1: 1.0, **measured}
    below = max(n for n in factors if n <= ranks)
    above = min((n for n in factors if n >= ranks), default=below)
    if above > below:
        share = (ranks - below) / (above - below)
        return factors[below] + share * (factors[above] - factors[below])
    return factors[below] * _turns(ranks, cores) / _turns(below, cores)


def _turns(ranks: int, cores: int | None) -> float:
    return 1.0 if cores is None else max(1.0, ranks / cores)


def all_reduce(nbytes: float, ranks: int, link: Link) -> float:
    """Return the seconds of a sum over ranks that have this link between each other."""
    if not link.direct:
        return all_reduce_ring(nbytes, ranks, link)
    # Each rank adds its share of all buffers, then reads the other shares; two meetings.
    latency = 2 * math.ceil(math.log2(ranks)) * link.latency_s
    return latency + 2 * (ranks - 1) / ranks * nbytes / link.bytes_per_s


def all_reduce_ring(nbytes: float, ranks: int, link: Link) -> float:
    """Return the seconds of a ring: 2 (P - 1) messages of n / P bytes, one after the other.

    >>> link = Link(name="10 GB/s", latency_s=1e-6, bytes_per_s=1e10)
    >>> round(all_reduce_ring(1e9, 4, link), 6)
    0.150006
    """
    return 2 * (ranks - 1) * link.message(nbytes / ranks) if ranks > 1 else 0.0


def all_reduce_tree(nbytes: float, ranks: int, link: Link) -> float:
    """Return the seconds of a pipelined tree: up and down, log2(P) latencies each, n bytes each."""
    if ranks == 1:
        return 0.0
    return 2 * (math.ceil(math.log2(ranks)) * link.latency_s + nbytes / link.bytes_per_s)


def all_reduce_between(nbytes: float, nodes: int, link: Link) -> float:
    """Return the seconds of a sum between nodes: the faster of a ring and a tree.

    All ranks of a node send their shares over its one link, n bytes together.
    """
    return min(all_reduce_ring(nbytes, nodes, link), all_reduce_tree(nbytes, nodes, link))


def all_gather(nbytes: float, ranks: int, link: Link) -> float:
    """Return the seconds of an all-gather of `nbytes` in all; a reduce-scatter costs the same."""
    return (ranks - 1) * link.message(nbytes / ranks) if ranks > 1 else 0.0


def broadcast(nbytes: float, ranks: int, link: Link) -> float:
    """Return the seconds of a pipelined tree from one rank to all."""
    if ranks == 1:
        return 0.0
    return math.ceil(math.log2(ranks)) * link.latency_s + nbytes / link.bytes_per_s


def exchange(nbytes: float, messages: int, link: Link) -> float:
    """Return the seconds in which a rank sends `messages` that hold `nbytes` together."""
    return messages * link.latency_s + nbytes / link.bytes_per_s if messages else 0.0


class Sum(NamedTuple):
    """What an all-reduce over all ranks costs."""

    seconds: float
    free_s: float
    """Seconds of it in which the rank could compute."""
    algorithm: str


NO_SUM = Sum(0.0, 0.0, "-")
"""What it costs one rank alone."""


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
    """Measured: by ranks that work on the node at once, how much longer each computes."""

    def __post_init__(self) -> None:
        least = min(self.nodes, self.ranks_per_node, self.cores_per_node or 1)
        if self.cores_per_node == 0 or least < 1 or not self.rank_speed > 0:
            raise PlatformError.because(
                f"Cluster(nodes={self.nodes}, ranks_per_node={self.ranks_per_node}, "
                f"cores_per_node={self.cores_per_node}, rank_speed={self.rank_speed})",
                hint="at least one node, rank and core (None: enough), and a speed above 0",
            )

    @property
    def ranks(self) -> int:
        """Ranks in all."""
        return self.nodes * self.ranks_per_node

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
        """Return what a sum over all ranks costs, by the fastest algorithm."""
        if self.ranks == 1:
            return NO_SUM
        link = self.network
        if self.nodes == 1:
            seconds = all_reduce(nbytes, self.ranks, link)
            return Sum(seconds, link.overlap * seconds, "direct" if link.direct else "ring")
        sums = [self._hierarchical(nbytes)]
        for name, formula in (("ring", all_reduce_ring), ("tree", all_reduce_tree)):
            seconds = formula(nbytes, self.ranks, link)
            sums.append(Sum(seconds, link.overlap * seconds, name))
        return min(sums)

    def all_gather(self, nbytes: float) -> Sum:
        """Return what joining `nbytes` in all costs; a reduce-scatter costs the same."""
        if self.ranks == 1:
            return NO_SUM
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
