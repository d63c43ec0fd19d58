"""The ways to split a training step, side by side, and how each grows to thousands of ranks. Pure.

Every rank holds the whole model (data parallel, DASO, sharded, Bayesian), or a team of ranks shares
each sample by space, by features or by graph. A team of `team` ranks holds one replica of the model
and computes the samples of all its ranks together; teams are data-parallel to each other. By
default a team is a node.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial, wraps
from typing import Any

from unisono.errors import PlatformError
from unisono.expect import expect_int
from unisono.plan.cluster import (
    Cluster,
    Link,
    Sum,
    all_gather,
    all_reduce,
    all_reduce_between,
    broadcast,
    exchange,
)
from unisono.plan.prediction import Cost, Impossible, Prediction, remaining, waiting
from unisono.plan.workload import Layer, Pace, Sent, Share, Workload
from unisono.topology.decompose import factorisations

GLOBAL_SKIP, BATCHES_TO_WAIT = 4, 1
"""DASO's skips in the first epochs after its warm-up."""


Way = Callable[..., Prediction | Impossible]
"""`way(workload, cluster, batch)`; those where ranks share a sample also take `team`."""
_NO_GRADIENTS = "the model is Bayesian: it has deltas, not gradients"


def _way(name: str) -> Callable[[Callable[..., Cost | str]], Way]:
    """Make a way of a function that returns its cost, or why it cannot be."""

    def of(estimate: Callable[..., Cost | str]) -> Way:
        @wraps(estimate)
        def predict(
            workload: Workload, cluster: Cluster, batch: float, **options: Any
        ) -> Prediction | Impossible:
            _check_asked(batch, options.get("team"))
            way = name.format("blocking" if options.get("blocking", True) else "non-blocking")
            cost = estimate(workload, cluster, batch, **options)
            if isinstance(cost, str):
                return Impossible(way=way, reason=cost)
            return Prediction(
                way=way,
                ranks=cluster.ranks,
                samples=batch * cluster.ranks,
                alone_s=workload.compute(batch) / cluster.rank_speed,
                **asdict(cost),
            )

        return predict

    return of


def _check_asked(batch: float, team: int | None) -> None:
    if not 0 < batch < math.inf:
        raise PlatformError.because(f"batch={batch}", hint="samples of a rank, above 0")
    if team is not None:
        expect_int("team", team, 1, error=PlatformError)


@_way("data parallel, {}")
def data_parallel(
    workload: Workload, cluster: Cluster, batch: float, *, blocking: bool = True
) -> Cost | str:
    """Predict `DataParallel` with `batch` samples a rank, updates at once or when needed."""
    if workload.is_bayesian:
        return _NO_GRADIENTS
    forward = cluster.compute(workload.forward.seconds(batch))
    backward = cluster.compute(workload.backward.seconds(batch))
    ready = [bucket.ready * backward for bucket in workload.buckets]
    needed = [0.0 if blocking else bucket.needed * forward for bucket in workload.buckets]
    sums = [cluster.all_reduce(bucket.nbytes) for bucket in workload.buckets]
    times = [each.seconds for each in sums]
    overlap = sum(each.free_s for each in sums) / (sum(times) or 1.0)
    return Cost(
        compute_s=forward + backward + cluster.compute(workload.optimizer_s),
        waiting_s=waiting(ready, times, needed, backward, overlap),
        communication_s=sum(times),
        memory_bytes=replica_memory(workload, batch),
        algorithm=max(sums).algorithm if sums else "-",
    )


@_way("DASO")
def daso(workload: Workload, cluster: Cluster, batch: float) -> Cost | str:
    """Predict `DASO` between its warm-up and its cool-down, averaged over its cycle."""
    node = data_parallel(workload, replace(cluster, nodes=1), batch)
    if isinstance(node, Impossible):
        return node.reason
    nbytes, outer = workload.parameter_bytes, cluster.outer
    between = all_reduce_between(nbytes, cluster.nodes, outer)
    inside = 0.0
    if cluster.nodes > 1:
        inside = broadcast(nbytes, cluster.ranks_per_node, cluster.node_link)
    late = max(0.0, between - BATCHES_TO_WAIT * node.step_s)
    exchange = remaining(between, late, outer.overlap) + inside
    return Cost(
        compute_s=node.compute_s,
        waiting_s=node.waiting_s + exchange / GLOBAL_SKIP,
        communication_s=node.communication_s + (between + inside) / GLOBAL_SKIP,
        memory_bytes=replica_memory(workload, batch) + nbytes * (cluster.nodes > 1),
        algorithm=node.algorithm,
        note=f"nodes meet every {GLOBAL_SKIP} batches" if cluster.nodes > 1 else "one node",
    )


@_way("sharded (FSDP2)")
def sharded(workload: Workload, cluster: Cluster, batch: float) -> Cost | str:
    """Predict parameters, gradients and optimizer state cut over all ranks (torch's FSDP2).

    Parameters are gathered for forward and again for backward, gradients reduce-scattered, in parts
    of a bucket; the next part travels while one is used, the first layer's cannot.
    """
    if workload.is_bayesian:
        return "FSDP2 shards torch modules"
    nbytes = workload.parameter_bytes
    parts = [cluster.all_gather(bucket.nbytes) for bucket in workload.buckets]
    once = sum(part.seconds for part in parts)
    overlap = sum(part.free_s for part in parts) / (once or 1.0)
    # Each rank updates only its own part.
    update = workload.optimizer_s / cluster.ranks
    compute = cluster.compute(workload.whole.passes.seconds(batch) + update)
    biggest = max((layer.parameter_bytes for layer in workload.layers), default=nbytes)
    first = workload.layers[0].parameter_bytes if workload.layers else nbytes
    ideal = max(3 * once - compute, cluster.all_gather(first).seconds)
    bytes_held = (2 * nbytes + workload.state_bytes) / cluster.ranks
    return Cost(
        compute_s=compute,
        waiting_s=remaining(3 * once, ideal, overlap),
        communication_s=3 * once,
        memory_bytes=bytes_held
        + (biggest if cluster.ranks > 1 else 0)
        + batch * workload.activation_bytes,
        algorithm=max(parts).algorithm if parts else "-",
        note="torch's fully_shard on an axis of the mesh",
    )


@_way("Bayesian")
def bayes(workload: Workload, cluster: Cluster, batch: float) -> Cost | str:
    """Predict `DDPSequential`: one sum of all deltas of means and variances after backward."""
    if not workload.is_bayesian:
        return "needs a net of unisono.bayes: --model bayes"
    seconds, _, algorithm = cluster.all_reduce(workload.sent_bytes)
    return Cost(
        compute_s=cluster.compute(workload.compute(batch)),
        waiting_s=seconds,
        communication_s=seconds,
        memory_bytes=replica_memory(workload, batch),
        algorithm=algorithm,
        note="deltas of means and variances",
    )


def replica_memory(workload: Workload, batch: float) -> float:
    """Return the bytes of a rank that holds everything; gradients live in their buckets."""
    return workload.held_bytes + batch * workload.activation_bytes


@_way("spatial (halos)")
def spatial(
    workload: Workload, cluster: Cluster, batch: float, team: int | None = None
) -> Cost | str:
    """Predict `unisono.nn.split`: blocks of each sample, with halos for what reads around a point.

    A layer that reads `reach` points beyond its block gets them from its neighbours, in forward,
    and sends their gradients back. Normalisations over the cut dims add two small sums.
    """
    size = _team_size(cluster, team)
    layers = workload.layers
    space = layers[0].input_shape[1:] if layers else ()
    if not any(layer.reach for layer in layers) or not space:
        return "the input has no spatial dims, or no layer that reads them"
    grid = grid_of(size, space)
    tight = next((n for n, parts in zip(space, grid, strict=True) if n < parts), None)
    if tight is not None:
        return f"{tight} points for {max(grid)} ranks"
    share = workload.whole if size == 1 else space_share(workload, grid, batch * size)
    note = f"teams of {size} as {'x'.join(map(str, grid))}"
    gradients = cluster.all_reduce(workload.sent_bytes)
    return _shared(workload, cluster, batch * size, size, share, gradients, note)


def space_share(workload: Workload, grid: Sequence[int], samples: float) -> Share:
    """Return what the busiest rank of a grid over the spatial dims computes and sends."""
    passes, (_, *space) = workload.whole.passes, workload.layers[0].input_shape
    part = math.prod(-(-n // parts) / n for n, parts in zip(space, grid, strict=True))
    sent: list[Sent] = []
    for layer in workload.layers:
        sent += _halos(layer, grid, samples * workload.item_bytes)
        if "BatchNorm" in layer.kind or "GroupNorm" in layer.kind:
            nbytes = 2 * layer.input_shape[0] * workload.item_bytes
            sent += [Sent("all_reduce", nbytes, math.prod(grid))] * 2
    return Share(
        passes=Pace(fixed_s=passes.fixed_s, sample_s=part * passes.sample_s),
        activation_bytes=part * workload.activation_bytes,
        sent=sent,
    )


def _halos(layer: Layer, grid: Sequence[int], point_bytes: float) -> list[Sent]:
    """Return the messages of one layer in forward, and those of its gradients."""
    channels, *sizes = layer.input_shape or (0,)
    if len(sizes) != len(grid) or len(layer.reach) != len(grid):
        return []
    block = [-(-n // parts) for n, parts in zip(sizes, grid, strict=True)]
    sent: list[Sent] = []
    for dim, (parts, reach) in enumerate(zip(grid, layer.reach, strict=True)):
        if parts == 1 or not reach:
            continue
        across = math.prod(n for d, n in enumerate(block) if d != dim)
        sides = min(parts - 1, 2)
        nbytes = round(reach * sides / 2 * channels * across * point_bytes)
        sent += [Sent("exchange", nbytes, sides)] * 2
    return sent


def _shared(
    workload: Workload,
    cluster: Cluster,
    samples: float,
    size: int,
    share: Share,
    gradients: Sum,
    note: str,
) -> Cost:
    """Predict teams of ranks that share `samples`, given what the busiest of a team does."""
    link = _team_link(cluster, size)
    compute = cluster.compute(share.passes.seconds(samples) + workload.optimizer_s)
    sent = math.fsum(_seconds(one, link) for one in share.sent)
    overlap = link.overlap if share.is_hidden else 0.0
    return Cost(
        compute_s=compute,
        waiting_s=remaining(sent, max(0.0, sent - compute), overlap) + gradients.seconds,
        communication_s=sent + gradients.seconds,
        memory_bytes=workload.held_bytes + samples * share.activation_bytes,
        algorithm=gradients.algorithm,
        note=note,
    )


def _seconds(one: Sent, link: Link) -> float:
    """Return how long a call takes, from the bytes that one rank sends."""
    kind = exchange if one.verb == "exchange" else all_reduce
    return kind(one.bytes, one.ranks, link)


@_way("tensor (features)")
def tensor(
    workload: Workload, cluster: Cluster, batch: float, team: int | None = None
) -> Cost | str:
    """Predict linear layers cut by columns and by rows in turn, as `DistributedLinear...` are."""
    size = _team_size(cluster, team)
    linear = [one for one in workload.layers if one.kind == "Linear" and one.input_shape]
    if not linear:
        return "no Linear layer"
    narrow = min(linear, key=lambda layer: min(layer.input_shape[-1], layer.output_shape[-1]))
    if min(narrow.input_shape[-1], narrow.output_shape[-1]) < size:
        shape = f"{narrow.input_shape[-1]} to {narrow.output_shape[-1]}"
        return f"{size} ranks share the features of {shape}"
    samples, item = batch * size, workload.item_bytes
    link = _team_link(cluster, size)
    moved = 0.0
    for number, layer in enumerate(linear):
        shape = layer.output_shape if number % 2 else layer.input_shape
        moved += 2 * all_gather(math.prod(shape) * samples * item, size, link)
    share = math.fsum(layer.share for layer in linear)
    part = share / size + (1 - share)
    split_bytes = sum(layer.parameter_bytes for layer in linear)
    whole_bytes = workload.parameter_bytes - split_bytes
    part_held = (whole_bytes + split_bytes / size) / max(workload.parameter_bytes, 1)
    gradients, _, algorithm = cluster.all_reduce(whole_bytes)
    if cluster.ranks > size:
        teams = cluster.all_reduce(split_bytes / size)
        gradients, algorithm = gradients + teams.seconds, teams.algorithm
    passes = workload.forward.seconds(samples * part) + workload.backward.seconds(samples * part)
    return Cost(
        compute_s=cluster.compute(passes + part_held * workload.optimizer_s),
        waiting_s=moved + gradients,
        communication_s=moved + gradients,
        memory_bytes=part_held * workload.held_bytes + samples * part * workload.activation_bytes,
        algorithm=algorithm,
        note=f"teams of {size}; {share:.0%} of the time is split",
    )


@_way("graph (halos)")
def graph(
    workload: Workload, cluster: Cluster, batch: float, team: int | None = None
) -> Cost | str:
    """Predict a graph cut over the ranks of a team: each fetches the rows that its edges read."""
    if workload.graph is None:
        return "the model has no graph: --model graph, or Subject.graph"
    size = _team_size(cluster, team)
    samples = batch * size
    share = workload.graph(size, samples) if size > 1 else workload.whole
    if share.refusal:
        return share.refusal
    gradients = cluster.all_reduce(workload.sent_bytes)
    note = "; ".join(filter(None, [f"teams of {size}", share.note]))
    return _shared(workload, cluster, samples, size, share, gradients, note)


def grid_of(ranks: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return a grid of `ranks` over dims of these sizes whose blocks are close to cubes.

    >>> grid_of(8, (28, 28)), grid_of(6, (100,)), grid_of(4, (64, 8))
    ((4, 2), (6,), (4, 1))
    """

    def longest_side(grid: tuple[int, ...]) -> tuple[float, ...]:
        sides = (size / parts for size, parts in zip(sizes, grid, strict=True))
        return max(sides), *(-parts for parts in grid)  # of equals, the one that cuts early dims

    return min(factorisations(ranks, len(sizes)), key=longest_side)


def _team_link(cluster: Cluster, size: int) -> Link:
    return cluster.node_link if size <= cluster.ranks_per_node else cluster.outer


def _team_size(cluster: Cluster, team: int | None) -> int:
    return min(team or cluster.ranks_per_node, cluster.ranks)


# -- side by side ---------------------------------------------------------------------------------


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
            prediction = way(workload, machine, share)
            if isinstance(prediction, Prediction) and _is_enough(prediction, machine, share, team):
                points.append((machine.ranks, prediction))
        if not points:
            continue
        alone = workload.compute(batch) / cluster.rank_speed  # one rank with the whole of it
        ranks, steps = zip(
            *((count, prediction.step_s) for count, prediction in points), strict=True
        )
        gain = tuple(alone / step for step in steps)
        curves.append(Curve(points[0][1].way, ranks, steps, gain))
    return curves


def rank_counts(ranks_per_node: int, largest: int) -> list[int]:
    """Return numbers of ranks for a plot, about ten to a decade: parts of a node, then whole nodes.

    >>> rank_counts(8, 100)
    [1, 2, 4, 8, 16, 24, 32, 48, 56, 72, 96]
    """
    counts = {int(10 ** (i / 10)) for i in range(10 * len(str(largest)) + 1)} | {largest}
    parts = {n for n in range(1, min(ranks_per_node, largest) + 1) if ranks_per_node % n == 0}
    nodes = {n // ranks_per_node * ranks_per_node for n in counts if n <= largest}
    return sorted((parts | nodes) - {0})


def _is_enough(prediction: Prediction, machine: Cluster, share: float, team: int | None) -> bool:
    """Whether each rank, or each team where teams share samples, has one."""
    in_teams = prediction.way.startswith(("spatial", "tensor", "graph"))
    return share * (_team_size(machine, team) if in_teams else 1) >= 1
