"""All ways side by side, and how each grows to thousands of ranks. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from unisono.plan.cluster import Cluster
from unisono.plan.prediction import Impossible, Prediction
from unisono.plan.replicas import bayes, daso, data_parallel, sharded
from unisono.plan.teams import graph, spatial, tensor
from unisono.plan.workload import Workload

__all__ = ["Curve", "compare", "rank_counts", "scaling"]

Way = Callable[[Workload, Cluster, float], Prediction | Impossible]


@dataclass(frozen=True)
class Curve:
    """How one way grows with the number of ranks."""

    way: str
    ranks: tuple[int, ...]
    step_s: tuple[float, ...]
    gain: tuple[float, ...]
    """Strong scaling: how many times as fast as one rank; weak: share of the ideal."""


def ways(team: int | None = None) -> list[Way]:
    """Return the ways to predict, those with teams for teams of this size (default: a node)."""
    teams: list[Way] = [partial(way, team=team) for way in (spatial, tensor, graph)]
    return [data_parallel, partial(data_parallel, blocking=False), daso, *teams, sharded, bayes]


def compare(
    workload: Workload, cluster: Cluster, batch: float, *, team: int | None = None
) -> list[Prediction | Impossible]:
    """Return what every way costs with `batch` samples for each rank."""
    return [way(workload, cluster, batch) for way in ways(team)]


def scaling(
    workload: Workload,
    cluster: Cluster,
    batch: float,
    counts: Sequence[int],
    *,
    strong: bool,
    team: int | None = None,
) -> list[Curve]:
    """Return a curve for each possible way.

    Args:
        workload: the model.
        cluster: links and size of a node; the number of nodes follows from the ranks.
        batch: samples for each rank (weak), or of all ranks together (strong).
        counts: numbers of ranks, ascending.
        strong: whether the whole work stays the same, or that of each rank.
        team: ranks that share a sample in the ways that do so; default: a node.
    """
    curves: list[Curve] = []
    for way in ways(team):
        points: list[tuple[int, Prediction]] = []
        for count in counts:
            machine = cluster.sized(count)
            share = batch / machine.ranks if strong else batch
            found = way(workload, machine, share)
            if isinstance(found, Prediction) and _is_enough(found, machine, share, team):
                points.append((machine.ranks, found))
        if not points:
            continue
        alone = workload.compute(batch) / cluster.rank_speed  # one rank with the whole of it
        ranks, steps = zip(*((count, found.step_s) for count, found in points), strict=True)
        gain = tuple(alone / step for step in steps)
        curves.append(Curve(points[0][1].way, ranks, steps, gain))
    return curves


def rank_counts(ranks_per_node: int, largest: int) -> list[int]:
    """Return numbers of ranks for a plot, about ten to a decade: parts of a node, then whole nodes.

    >>> rank_counts(8, 100)
    [1, 2, 4, 8, 16, 24, 32, 48, 56, 72, 96]
    """
    wanted = {int(10 ** (i / 10)) for i in range(10 * len(str(largest)) + 1)} | {largest}
    parts = {n for n in range(1, ranks_per_node + 1) if ranks_per_node % n == 0}
    nodes = {n // ranks_per_node * ranks_per_node for n in wanted if n <= largest}
    return sorted((parts | nodes) - {0})


def _is_enough(found: Prediction, machine: Cluster, share: float, team: int | None) -> bool:
    """Whether nobody is left without a sample: a rank, or a team where teams share them."""
    in_teams = found.way.startswith(("spatial", "tensor", "graph"))
    size = min(team or machine.ranks_per_node, machine.ranks) if in_teams else 1
    return share * size >= 1
