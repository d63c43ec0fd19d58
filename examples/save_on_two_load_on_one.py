"""Save a split network on several ranks, load it in one process and on another number of ranks.

The state of a distributed layer is that of the torch layer of the global size: it knows no layout.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

import unisono
from unisono.nn import DistributedLinear, full_state_dict
from unisono.topology import Partition


def split_linear() -> tuple[DistributedLinear, Partition, Partition]:
    """Return a linear layer whose weight is cut by rows over all ranks."""
    size = unisono.world().size
    whole, rows = Partition([1, 1]), Partition([1, size])
    return DistributedLinear(whole, rows, Partition([size, 1]), 6, 7), whole, rows


def save(path: Path) -> list[tuple[int, ...]]:
    """Save what the layer knows; return the shape of this rank's block of the weight."""
    torch.manual_seed(3)
    layer, _, _ = split_linear()
    state = full_state_dict(layer, rank=0)  # all ranks call it, rank 0 gets the tensors
    if unisono.world().rank == 0:
        torch.save(state, path)
    return [tuple(layer.weight.shape)]


def load(path: Path, x: Tensor) -> Tensor:
    """Load on this number of ranks and return this rank's part of the output."""
    layer, whole, _ = split_linear()
    layer.load_state_dict(torch.load(path))
    return layer(x if whole.active else x.new_empty(len(x), 0)).detach()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    ranks = parser.parse_args().ranks
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as folder:
        # Rank 0's, where `unisono run` has started the ranks: these then do all the parts.
        path = Path(unisono.world().broadcast_object(folder)) / "layer.pt"
        blocks = [shape for shapes in unisono.run(save, path, ranks=ranks) for shape in shapes]
        print(f"saved on {len(blocks)} ranks from blocks {blocks}")
        plain = nn.Linear(6, 7)
        plain.load_state_dict(torch.load(path))  # one process, plain torch
        expected = plain(x).detach()
        for other in (1, ranks, ranks + 1):
            parts = list(unisono.run(load, path, x, ranks=other))
            error = (torch.cat(parts, dim=1) - expected).abs().max().item()
            print(f"loaded on {len(parts)}: output differs from plain torch by {error:.1e}")
            if error > 1e-6:
                raise SystemExit("the loaded layer is another one")


if __name__ == "__main__":
    main()
