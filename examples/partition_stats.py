"""Four ways to split one cloud of points over ranks, and what each of them costs. No ranks needed.

Prints the table of costs and draws the parts if matplotlib is there.
"""

from __future__ import annotations

import argparse

import torch

from unisono.graph_parallel import GraphPartition, radius_graph
from unisono.graph_parallel.stats import comparison


def cloud(points):
    """Points in a box, denser to one side; about eleven neighbours each."""
    draw = torch.Generator().manual_seed(0)
    pos = torch.rand(points, 3, generator=draw)
    pos[:, 0] = pos[:, 0] ** 1.5
    return pos, radius_graph(pos, 1.25 * points ** (-1 / 3)).edge_index


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4, help="number of parts")
    parser.add_argument("--points", type=int, default=4000)
    parser.add_argument("--plot", default="partitions.png")
    options = parser.parse_args()
    pos, edges = cloud(options.points)
    nodes, parts = options.points, options.ranks
    corner = (pos - pos.min(0).values).norm(dim=1).argsort().argsort() * parts // nodes
    ways = {
        "contiguous": GraphPartition.contiguous(nodes, parts),
        "morton": GraphPartition.morton(pos, parts),
        "balanced, morton": GraphPartition.balanced(edges, nodes, parts, order="morton", pos=pos),
        "own (shells)": GraphPartition.from_owner(corner, parts),
    }
    print(comparison({name: part.stats(edges) for name, part in ways.items()}))
    print()
    print(ways["balanced, morton"].stats(edges).table())
    print(draw(pos, ways, options.plot))


def draw(pos, ways, path):
    try:
        import matplotlib
    except ImportError:
        return "no plot: matplotlib is not installed"
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(ways), figsize=(4 * len(ways), 4))
    slab = pos[:, 0] < 0.15
    for axes, (name, part) in zip(panels, ways.items(), strict=True):
        axes.scatter(pos[slab, 1], pos[slab, 2], c=part.owner[slab], s=6, cmap="tab10")
        axes.set(title=name, xticks=[], yticks=[])
    figure.savefig(path, dpi=100, bbox_inches="tight")
    return f"drawn: {path}"


if __name__ == "__main__":
    main()
