"""`GraphStats`: what a split of a graph costs, before anything is moved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class GraphStats:
    """Counts of a graph's split over ranks. An edge belongs to the owner of its target."""

    edges_total: int
    """Edges of the graph."""
    edges_cut: int
    """Edges whose source another rank owns."""
    nodes_per_rank: tuple[int, ...]
    """Nodes that each rank owns."""
    edges_per_rank: tuple[int, ...]
    """Edges that each rank computes."""
    halo_per_rank: tuple[int, ...]
    """Rows that each rank fetches from others, each once."""

    @property
    def edge_cut(self) -> float:
        """Share of edges that are cut."""
        return self.edges_cut / self.edges_total if self.edges_total else 0.0

    @property
    def node_imbalance(self) -> float:
        """Largest over mean number of nodes; 1 is perfect."""
        return _imbalance(self.nodes_per_rank)

    @property
    def edge_imbalance(self) -> float:
        """Largest over mean number of edges; 1 is perfect."""
        return _imbalance(self.edges_per_rank)

    @property
    def halo_share(self) -> float:
        """Rows of all halos, as a share of those that a full gather moves."""
        everything = self.gather_bytes(1)
        return self.halo_bytes(1) / everything if everything else 0.0

    def halo_bytes(self, row_bytes: int) -> int:
        """Return the bytes that all ranks together receive in one exchange of the halo."""
        return sum(self.halo_per_rank) * row_bytes

    def gather_bytes(self, row_bytes: int) -> int:
        """Return the bytes that all ranks together receive when every row goes everywhere."""
        return (len(self.nodes_per_rank) - 1) * sum(self.nodes_per_rank) * row_bytes

    def table(self) -> str:
        """Return one line per rank, and the totals."""
        lines = ["rank     nodes     edges      halo"]
        for rank, counts in enumerate(
            zip(self.nodes_per_rank, self.edges_per_rank, self.halo_per_rank, strict=True)
        ):
            lines.append(f"{rank:4}" + "".join(f"{count:10,}" for count in counts))
        lines.append(
            f"cut {self.edge_cut:.1%} of {self.edges_total:,} edges; "
            f"largest / mean: nodes {self.node_imbalance:.2f}, edges {self.edge_imbalance:.2f}; "
            f"the halo is {self.halo_share:.1%} of a full gather"
        )
        return "\n".join(lines)


def comparison(named: Mapping[str, GraphStats]) -> str:
    """Return one line for each split of the same graph."""
    width = max((len(name) for name in named), default=0)
    lines = [f"{'split':{width}}  edge cut  nodes max/mean  edges max/mean  halo / gather"]
    for name, stats in named.items():
        lines.append(
            f"{name:{width}}  {stats.edge_cut:8.1%}  {stats.node_imbalance:14.2f}"
            f"  {stats.edge_imbalance:14.2f}  {stats.halo_share:13.1%}"
        )
    return "\n".join(lines)


def _imbalance(counts: Sequence[int]) -> float:
    return max(counts) * len(counts) / sum(counts) if sum(counts) else 1.0
