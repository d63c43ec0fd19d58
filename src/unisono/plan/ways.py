"""The ways to split a training step, side by side. Pure.

Every rank holds the whole model (data parallel, DASO, sharded, Bayesian), or a team of ranks shares
each sample by space, by features or by graph. A team of `team` ranks holds one replica of the model
and computes the samples of all its ranks together; teams are data-parallel to each other. By
default a team is a node.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial, wraps
from typing import Any

from unisono.errors import PlatformError
from unisono.expect import expect_int
from unisono.plan.cluster import (
    Cluster,
    Link,
    all_gather,
    all_reduce,
    all_reduce_between,
    broadcast,
    exchange,
)
from unisono.plan.prediction import Cost, Impossible, Prediction, remaining, waiting
from unisono.plan.workload import Layer, Workload
from unisono.topology.decompose import factorisations

GLOBAL_SKIP, BATCHES_TO_WAIT = 4, 1
"""DASO's skips in the first epochs after its warm-up."""


_NEIGHBOURS = 8
"""Largest number of ranks that a rank of a cut graph fetches from."""
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
    compute = cluster.compute(workload.passes.seconds(batch) + update)
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
    samples = batch * size
    passes = workload.passes
    blocks = (-(-n // parts) / n for n, parts in zip(space, grid, strict=True))
    part = math.prod(blocks)
    compute = passes.fixed_s + samples * part * passes.sample_s + workload.optimizer_s
    link = _team_link(cluster, size)
    halos = math.fsum(
        _halos_s(layer, grid, samples * workload.item_bytes, link) for layer in layers
    )
    norms = (layer for layer in layers if "BatchNorm" in layer.kind or "GroupNorm" in layer.kind)
    sums = math.fsum(
        2 * all_reduce(2 * layer.input_shape[0] * workload.item_bytes, size, link)
        for layer in norms
    )
    gradients = cluster.all_reduce(workload.sent_bytes)
    sent = halos + sums + gradients.seconds
    return Cost(
        compute_s=cluster.compute(compute),
        waiting_s=sent,
        communication_s=sent,
        memory_bytes=workload.held_bytes + samples * part * workload.activation_bytes,
        algorithm=gradients.algorithm,
        note=f"teams of {size} as {'x'.join(map(str, grid))}",
    )


def _halos_s(layer: Layer, grid: Sequence[int], point_bytes: float, link: Link) -> float:
    """Return the seconds of one layer's messages in forward, and of those of its gradients."""
    channels, *sizes = layer.input_shape or (0,)
    if len(sizes) != len(grid) or len(layer.reach) != len(grid):
        return 0.0
    block = [-(-n // parts) for n, parts in zip(sizes, grid, strict=True)]
    seconds = 0.0
    for dim, (parts, reach) in enumerate(zip(grid, layer.reach, strict=True)):
        if parts == 1 or not reach:
            continue
        across = math.prod(n for d, n in enumerate(block) if d != dim)
        sides = min(parts - 1, 2)
        nbytes = reach * sides / 2 * channels * across * point_bytes
        seconds += 2 * exchange(nbytes, sides, link)
    return seconds


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
    if 2 * size > max(workload.graph.nodes, 2):
        return f"{size} ranks for {workload.graph.nodes} nodes of a graph"
    samples, passes, link = batch * size, workload.passes, _team_link(cluster, size)
    part, rows = workload.graph.busiest(size)
    compute = passes.fixed_s + samples * part * passes.sample_s + workload.optimizer_s
    nbytes = rows * workload.graph.row_bytes * samples
    # Rows in forward and their gradients in backward, while inner edges are computed.
    fetched = exchange(nbytes, min(size - 1, _NEIGHBOURS), link) if rows else 0.0
    sent = 2 * workload.graph.exchanges * fetched
    gradients = cluster.all_reduce(workload.sent_bytes)
    compute_s = cluster.compute(compute)
    waiting_s = remaining(sent, max(0.0, sent - compute_s), link.overlap) + gradients.seconds
    return Cost(
        compute_s=compute_s,
        waiting_s=waiting_s,
        communication_s=sent + gradients.seconds,
        memory_bytes=workload.held_bytes + samples * part * workload.activation_bytes,
        algorithm=gradients.algorithm,
        note=f"teams of {size}; {rows} of {workload.graph.nodes} rows fetched",
    )


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


def ways(team: int | None = None) -> list[Way]:
    """Return the ways to predict, those with teams for teams of this size (default: a node)."""
    teams: list[Way] = [partial(way, team=team) for way in (spatial, tensor, graph)]
    return [data_parallel, partial(data_parallel, blocking=False), daso, *teams, sharded, bayes]


def compare(
    workload: Workload, cluster: Cluster, batch: float, *, team: int | None = None
) -> list[Prediction | Impossible]:
    """Return what every way costs with `batch` samples for each rank."""
    return [way(workload, cluster, batch) for way in ways(team)]
