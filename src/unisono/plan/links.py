"""What a message costs: latency and bandwidth of a link, and the formulas of collectives. Pure.

`n` bytes over a link take `latency_s + n / bytes_per_s`. Collectives are sums of such messages, as
the usual algorithms send them; one rank alone sends nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

__all__ = [
    "Link",
    "all_gather",
    "all_reduce",
    "all_reduce_between",
    "all_reduce_ring",
    "all_reduce_tree",
    "broadcast",
    "contention",
    "exchange",
    "slower_of",
]


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
    """Measured: how much less bandwidth each of so many ranks of a node has, compared with two."""

    def among(self, ranks: int, cores: int | None) -> Link:
        """Return the link as `ranks` of a node with so many cores find it, all using it at once."""
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
    known = {1: 1.0, **measured}
    below = max(n for n in known if n <= ranks)
    above = min((n for n in known if n >= ranks), default=below)
    if above > below:
        share = (ranks - below) / (above - below)
        return known[below] + share * (known[above] - known[below])
    return known[below] * _turns(ranks, cores) / _turns(below, cores)


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
    """Return the seconds of a sum between nodes: a ring or a tree, whichever is faster.

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
