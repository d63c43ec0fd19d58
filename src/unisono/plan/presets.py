"""Models to plan with, one for each way to split; sizes that a laptop trains in milliseconds."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from unisono import bayes
from unisono.plan.subject import GraphInput, Subject

__all__ = ["PRESETS"]

SIDE, FEATURES = 48, 16


def mlp() -> Subject:
    """Return three wide linear layers: much to send, little to compute."""
    model = nn.Sequential(
        nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 64)
    )
    return Subject(name="mlp", model=model, batch=(torch.randn(64, 512),))


def cnn() -> Subject:
    """Return four convolutions over 64 x 64 pictures: little to send, much to compute."""
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(4), nn.Flatten(), nn.Linear(32 * 64, 64),
    )  # fmt: skip
    return Subject(name="cnn", model=model, batch=(torch.randn(16, 3, 64, 64),))


def transformer() -> Subject:
    """Return four encoder layers of width 256 over sequences of 32."""
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    return Subject(name="transformer", model=model, batch=(torch.randn(8, 32, 256),))


class GridNetwork(nn.Module):
    """Three rounds of messages between the four neighbours of each point of a grid."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds = nn.ModuleList(nn.Linear(2 * FEATURES, FEATURES) for _ in range(3))
        self.edges = nn.Buffer(_grid_edges(SIDE))

    def forward(self, x: Tensor) -> Tensor:
        """Return new features of the nodes `x`, `[B, N, F]`."""
        source, target = self.edges
        for layer in self.rounds:
            heard = torch.zeros_like(x).index_add(1, target, x[:, source])
            x = torch.relu(layer(torch.cat([x, heard], -1)))
        return x


def graph() -> Subject:
    """Return message passing on a grid of 48 x 48 nodes."""
    rows = torch.arange(SIDE * SIDE)
    points = torch.stack([rows // SIDE, rows % SIDE], 1).double()
    return Subject(
        name="graph",
        model=GridNetwork(),
        batch=(torch.randn(4, SIDE * SIDE, FEATURES),),
        graph=GraphInput(
            edge_index=_grid_edges(SIDE),
            nodes=SIDE * SIDE,
            row_bytes=4 * FEATURES,
            exchanges=3,
            pos=points,
        ),
    )


def bayesian() -> Subject:
    """Return a net of means and variances, 256-512-512-10."""
    model = bayes.Sequential(
        bayes.Linear(256, 512), bayes.ReLU(), bayes.Linear(512, 512), bayes.ReLU(),
        bayes.Linear(512, 10),
    )  # fmt: skip
    return Subject(name="bayes", model=model, batch=(torch.randn(64, 256),))


def _grid_edges(side: int) -> Tensor:
    """Return both directions of all edges of a square grid, `[2, E]`."""
    rows = torch.arange(side * side).view(side, side)
    pairs = [(rows[:, :-1], rows[:, 1:]), (rows[:-1], rows[1:])]
    one = torch.cat([torch.stack([a.flatten(), b.flatten()]) for a, b in pairs], 1)
    return torch.cat([one, one.flip(0)], 1)


PRESETS = {
    "mlp": mlp,
    "cnn": cnn,
    "transformer": transformer,
    "graph": graph,
    "bayes": bayesian,
}
"""By the name that `--model` takes."""
