"""Which ranks share a node, and which ranks of different nodes exchange: pure, from hostnames."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from unisono.errors import MeshError


@dataclass(frozen=True)
class NodeLayout:
    """Ranks of each node, in rank order; nodes ordered by their lowest rank.

    >>> layout = NodeLayout.of_hosts(["a", "b", "a", "b", "b"])
    >>> layout.nodes, layout.groups
    (((0, 2), (1, 3, 4)), ((0, 1), (2, 3)))
    >>> layout.weights
    (0.8, 1.2)
    """

    nodes: tuple[tuple[int, ...], ...]

    @classmethod
    def of_hosts(cls, hosts: Sequence[str]) -> NodeLayout:
        """Return the layout of ranks that run on these hosts."""
        nodes: dict[str, list[int]] = {}
        for rank, host in enumerate(hosts):
            nodes.setdefault(host, []).append(rank)
        return cls(tuple(tuple(ranks) for ranks in nodes.values()))

    @classmethod
    def of_blocks(cls, size: int, ranks_per_node: int | Sequence[int]) -> NodeLayout:
        """Return the layout of consecutive ranks.

        Args:
            size: number of ranks.
            ranks_per_node: ranks of every node, or of each node.

        Raises:
            MeshError: the blocks do not make up `size` ranks.
        """
        if isinstance(ranks_per_node, int):
            if ranks_per_node < 1 or size % ranks_per_node:
                share = (
                    f"{size} / {ranks_per_node} = {size / ranks_per_node:g}"
                    if ranks_per_node > 0
                    else f"{ranks_per_node} < 1"
                )
                raise MeshError.because(
                    f"ranks_per_node={ranks_per_node}",
                    f"{size} ranks",
                    share,
                    f"a divisor of {size}, or a list of block sizes that add up to it",
                )
            blocks = [ranks_per_node] * (size // ranks_per_node)
        else:
            blocks = list(ranks_per_node)
        if min(blocks, default=0) < 1 or sum(blocks) != size:
            written = " + ".join(map(str, blocks)) or "nothing"
            raise MeshError.because(
                f"ranks_per_node={blocks}",
                f"{size} ranks",
                f"{written} = {sum(blocks)} != {size}"
                if sum(blocks) != size
                else f"{min(blocks)} < 1",
                "positive block sizes that add up to the number of ranks",
            )
        starts = [sum(blocks[:i]) for i in range(len(blocks))]
        return cls(
            tuple(tuple(range(a, a + n)) for a, n in zip(starts, blocks, strict=True)),
        )

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Global groups: group `i` holds the `i`-th rank of every node.

        There are as many as the smallest node has ranks.
        """
        smallest = min(len(node) for node in self.nodes)
        return tuple(tuple(node[i] for node in self.nodes) for i in range(smallest))

    @cached_property
    def weights(self) -> tuple[float, ...]:
        """Share of each node in a mean times the number of nodes: 1 for equal nodes."""
        size = sum(len(node) for node in self.nodes)
        return tuple(len(self.nodes) * len(node) / size for node in self.nodes)

    def node_of(self, rank: int) -> int:
        """Return the number of the node of a rank."""
        return next(i for i, node in enumerate(self.nodes) if rank in node)
