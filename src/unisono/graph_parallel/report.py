"""What every partition of a saved graph would cost: the text of `unisono topo --graph`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from unisono.errors import PartitionError
from unisono.graph_parallel.partition import GraphPartition
from unisono.graph_parallel.stats import comparison


def graph_file_report(path: str | Path, parts: int) -> str:
    """Return a comparison of partitions of a graph, and the table of each. Local.

    Args:
        path: an `.npz` file with `edge_index` `[2, E]`; if it has `pos` `[N, D]`, partitions in
            space are shown too, and with `owner` `[N]` one of yours; `num_nodes` counts nodes
            without edges.
        parts: number of parts.
    """
    arrays = _arrays(Path(path))
    edges = torch.from_numpy(arrays["edge_index"]).long()
    pos = torch.from_numpy(arrays["pos"]).double() if "pos" in arrays else None
    nodes = int(edges.max()) + 1 if edges.numel() else 0
    nodes = int(arrays["num_nodes"]) if "num_nodes" in arrays else nodes
    nodes = len(pos) if pos is not None else nodes
    owner = torch.from_numpy(arrays["owner"]).long() if "owner" in arrays else None
    ways = _ways(edges, nodes, parts, pos, owner)
    stats = {name: part.stats(edges) for name, part in ways.items()}
    tables = [f"{name}\n{each.table()}" for name, each in stats.items()]
    return "\n\n".join([comparison(stats), *tables])


def _ways(
    edges: Tensor, nodes: int, parts: int, pos: Tensor | None, owner: Tensor | None
) -> dict[str, GraphPartition]:
    ways = {
        "contiguous": GraphPartition.contiguous(nodes, parts),
        "balanced": GraphPartition.balanced(edges, nodes, parts),
    }
    if pos is not None:
        ways["morton"] = GraphPartition.morton(pos, parts)
        ways["balanced, morton"] = GraphPartition.balanced(
            edges, nodes, parts, order="morton", pos=pos
        )
    if owner is not None:
        ways["owner"] = GraphPartition.from_owner(owner, parts)
    return ways


def _arrays(path: Path) -> dict[str, np.ndarray]:
    asked = f"a report on {path}"
    hint = "numpy.savez(path, edge_index=edge_index, pos=pos)"
    try:
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError) as error:
        raise PartitionError.because(asked, f"it cannot be read: {error}", None, hint) from None
    if "edge_index" not in arrays:
        raise PartitionError.because(asked, f"arrays {sorted(arrays)}", None, hint)
    return arrays
