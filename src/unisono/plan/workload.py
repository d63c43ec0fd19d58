"""A model as the planner sees it: times, bytes and layers of one training step. Pure.

`profile.py` measures one; tests and users may also write one down.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from unisono.graph_parallel import GraphPartition


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Seconds of a pass over a batch on one core: a fixed part and one for each sample."""

    fixed_s: float
    sample_s: float

    def seconds(self, samples: float) -> float:
        """Return the time of `samples`."""
        return self.fixed_s + samples * self.sample_s


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One leaf of the model; shapes are those of one sample."""

    name: str
    kind: str
    parameter_bytes: int
    share: float
    """Of the time of the whole."""
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    reach: tuple[int, ...] = ()
    """Points beyond a block that it reads along each spatial dim, on both sides together."""


@dataclass(frozen=True, kw_only=True)
class SentBucket:
    """Gradients that travel together."""

    nbytes: int
    ready: float
    """Share of backward after which the last of them is there."""
    needed: float
    """Share of the next forward after which the first of their parameters is used."""


@dataclass(frozen=True, kw_only=True)
class GraphInput:
    """The graph that each sample lives on."""

    edge_index: Tensor
    """Source and target of each edge, `[2, E]`."""
    nodes: int
    row_bytes: int
    """Bytes of a node's features in the layers that read neighbours."""
    exchanges: int
    """How many layers do."""
    pos: Tensor | None = None
    """Coordinates, `[N, D]`; with them a split keeps neighbours together."""

    def busiest(self, ranks: int) -> tuple[float, int]:
        """Return the share of all edges of the rank that has most, and the most rows one fetches.

        >>> import torch
        >>> edges = torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2]])
        >>> GraphInput(edge_index=edges, nodes=4, row_bytes=4, exchanges=1).busiest(2)
        (0.5, 0)
        """
        if ranks == 1:
            return 1.0, 0
        order = "index" if self.pos is None else "morton"
        split = GraphPartition.balanced(
            self.edge_index, self.nodes, ranks, order=order, pos=self.pos
        )
        stats = split.stats(self.edge_index)
        return stats.edge_imbalance / ranks, max(stats.halo_per_rank)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One training step of a model; times are those of one core, alone."""

    name: str
    forward: Pace
    backward: Pace
    optimizer_s: float
    """One update of all parameters."""
    parameter_bytes: int
    state_bytes: int
    """What the optimizer keeps."""
    activation_bytes: float
    """Kept from forward to backward for each sample."""
    buckets: Sequence[SentBucket]
    """In the order in which they travel."""
    layers: Sequence[Layer] = ()
    graph: GraphInput | None = None
    is_bayesian: bool = False
    item_bytes: int = 4
    """Of a number."""

    @property
    def sent_bytes(self) -> int:
        """What all ranks add up in one step."""
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def held_bytes(self) -> int:
        """What a rank with all parameters holds beside activations."""
        return self.parameter_bytes + self.sent_bytes + self.state_bytes

    @property
    def passes(self) -> Pace:
        """Forward and backward together."""
        a, b = self.forward, self.backward
        return Pace(fixed_s=a.fixed_s + b.fixed_s, sample_s=a.sample_s + b.sample_s)

    def compute(self, samples: float) -> float:
        """Return the seconds of forward, backward and update on one core."""
        return self.passes.seconds(samples) + self.optimizer_s


def fit_pace(samples: Sequence[float], seconds: Sequence[float]) -> Pace:
    """Return the line through measured times, with neither part negative; least relative squares.

    >>> line = fit_pace([1, 2, 4], [3.0, 5.0, 9.0])
    >>> round(line.fixed_s, 6), round(line.sample_s, 6)
    (1.0, 2.0)
    """
    # Weights 1 / t^2: a small batch counts as much as a large one.
    rows = [(1 / t, n / t) for n, t in zip(samples, seconds, strict=True)]
    aa, ab, bb = (math.fsum(r[i] * r[j] for r in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = (math.fsum(r[i] for r in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    if determinant > 1e-12 * aa * bb:
        fixed, each = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
        if fixed >= 0 and each >= 0:
            return Pace(fixed_s=fixed, sample_s=each)
        if each < 0:
            return Pace(fixed_s=a / aa, sample_s=0.0)
    return Pace(fixed_s=0.0, sample_s=b / bb)
