"""Ways in which a team of ranks shares each sample: by space, by features, by graph. Pure.

A team of `team` ranks holds one replica of the model and computes the samples of all its ranks
together; teams are data-parallel to each other. By default a team is a node.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from unisono.plan.cluster import Cluster
from unisono.plan.links import Link, all_gather, exchange
from unisono.plan.overlap import remaining
from unisono.plan.prediction import Impossible, Prediction, predicted
from unisono.plan.replicas import replica_memory
from unisono.plan.workload import Layer, Workload

__all__ = ["graph", "grid_of", "spatial", "tensor"]


def spatial(
    workload: Workload, cluster: Cluster, batch: float, team: int | None = None
) -> Prediction | Impossible:
    """Predict distributed convolutions and pools: blocks of each sample, and halos around them.

    From the first layer that needs all points (Flatten, Linear) on, every rank computes the whole.
    Whether and where it can be split is what `distribute` said when the model was measured.
    """
    way, size = "spatial (halos)", _team_size(cluster, team)
    space = next((layer.input_shape[1:] for layer in workload.layers), ())
    grid = grid_of(size, space) if space else ()
    said = (workload.space or {}).get(tuple(d for d, parts in enumerate(grid) if parts > 1))
    if said is not None and said.refusal:
        return Impossible(way=way, reason=said.refusal)
    layers = _spatial_part(workload.layers)
    if said is not None:
        layers = [layer for layer in workload.layers if layer.name in said.layers]
    windows = [layer for layer in layers if layer.window is not None]
    if not layers or (said is None and not windows):
        return Impossible(way=way, reason="no convolution or pool in front")
    busiest = math.prod(
        -(-points // parts) / points for points, parts in zip(space, grid, strict=True)
    )
    samples, item = batch * size, workload.item_bytes
    link = _team_link(cluster, size)
    halos = math.fsum(_halo(layer, grid, samples * item, link) for layer in windows)
    joined = math.prod(layers[-1].output_shape) * samples * item
    share = math.fsum(layer.share for layer in layers)
    part = share * busiest + (1 - share)
    compute = cluster.compute(workload.compute(samples * part))
    gather = 2 * all_gather(joined, size, link) if len(layers) < len(workload.layers) else 0.0
    gradients, _, algorithm = cluster.all_reduce(workload.sent_bytes)
    hidden = remaining(2 * halos, max(0.0, 2 * halos - share * busiest * compute), link.overlap)
    return predicted(
        way,
        workload,
        cluster,
        batch,
        compute_s=compute,
        waiting_s=hidden + gather + gradients,
        communication_s=2 * halos + gather + gradients,
        memory_bytes=replica_memory(workload, samples * part),
        algorithm=algorithm,
        note=f"teams of {size} as {'x'.join(map(str, grid))}; {share:.0%} of the time is split"
        + _idle(windows, grid)
        + ('; distribute(..., custom="recurse")' if said and said.custom == "recurse" else ""),
    )


def tensor(
    workload: Workload, cluster: Cluster, batch: float, team: int | None = None
) -> Prediction | Impossible:
    """Predict linear layers cut by columns and by rows in turn, as `DistributedLinear...` are."""
    way, size = "tensor (features)", _team_size(cluster, team)
    linear = [layer for layer in workload.layers if layer.kind == "Linear"]
    if not linear:
        return Impossible(way=way, reason="no Linear layer")
    narrow = min(linear, key=lambda layer: min(layer.input_shape[-1], layer.output_shape[-1]))
    if min(narrow.input_shape[-1], narrow.output_shape[-1]) < size:
        shape = f"{narrow.input_shape[-1]} to {narrow.output_shape[-1]}"
        return Impossible(way=way, reason=f"{size} ranks share the features of {shape}")
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
    own = (whole_bytes + split_bytes / size) / max(workload.parameter_bytes, 1)
    gradients, _, algorithm = cluster.all_reduce(whole_bytes)
    if cluster.ranks > size:
        teams = cluster.all_reduce(split_bytes / size)
        gradients, algorithm = gradients + teams.seconds, teams.algorithm
    passes = workload.forward.seconds(samples * part) + workload.backward.seconds(samples * part)
    states = own * (workload.parameter_bytes + workload.sent_bytes + workload.state_bytes)
    return predicted(
        way,
        workload,
        cluster,
        batch,
        compute_s=cluster.compute(passes + own * workload.optimizer_s),
        waiting_s=moved + gradients,
        communication_s=moved + gradients,
        memory_bytes=states + samples * part * workload.activation_bytes,
        algorithm=algorithm,
        note=f"teams of {size}; {share:.0%} of the time is split",
    )


def graph(
    workload: Workload, cluster: Cluster, batch: float, team: int | None = None
) -> Prediction | Impossible:
    """Predict a graph cut over the ranks of a team: each fetches the rows that its edges read."""
    way, size = "graph (halos)", _team_size(cluster, team)
    load = workload.graph
    if load is None:
        return Impossible(way=way, reason="the model has no graph: --model graph, or Subject.graph")
    cut = load.cuts.get(size)
    if size > 1 and cut is None:
        return Impossible(way=way, reason=f"{size} ranks for {load.nodes} nodes of a graph")
    samples = batch * size
    link = _team_link(cluster, size)
    busiest = samples / size * (cut.imbalance if cut else 1.0)
    halo = 0.0
    if cut is not None and size > 1:
        nbytes = cut.halo_rows * load.row_bytes * samples
        halo = 2 * load.exchanges * exchange(nbytes, cut.neighbours, link)
    compute = cluster.compute(workload.compute(busiest))
    gradients, _, algorithm = cluster.all_reduce(workload.sent_bytes)
    return predicted(
        way,
        workload,
        cluster,
        batch,
        compute_s=compute,
        waiting_s=remaining(halo, max(0.0, halo - compute), link.overlap) + gradients,
        communication_s=halo + gradients,
        memory_bytes=replica_memory(workload, busiest),
        algorithm=algorithm,
        note=f"teams of {size}"
        + (f"; {cut.halo_rows} of {load.nodes} rows fetched" if cut else ""),
    )


def grid_of(ranks: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return a grid of `ranks` over dims of these sizes whose blocks are close to cubes.

    >>> grid_of(8, (28, 28)), grid_of(6, (100,)), grid_of(4, (64, 8))
    ((4, 2), (6,), (4, 1))
    """
    grid = [1] * len(sizes)
    for prime in sorted(_primes(ranks), reverse=True):
        longest = max(range(len(sizes)), key=lambda dim: sizes[dim] / grid[dim])
        grid[longest] *= prime
    return tuple(grid)


def _primes(number: int) -> list[int]:
    found: list[int] = []
    divisor = 2
    while number > 1:
        while number % divisor == 0:
            found.append(divisor)
            number //= divisor
        divisor += 1
    return found


def _spatial_part(layers: Sequence[Layer]) -> list[Layer]:
    """Return the layers in front of the first that needs all points."""
    part: list[Layer] = []
    for layer in layers:
        if layer.kind in ("Flatten", "Linear", "Attention"):
            break
        part.append(layer)
    return part


def _idle(layers: Sequence[Layer], grid: Sequence[int]) -> str:
    """Say in which layer first some ranks have nothing to do, if so."""
    for layer in layers:
        for points, parts in zip(layer.input_shape[1:], grid, strict=True):
            if parts > points:
                return f"; {parts} ranks along the {points} points of layer {layer.name}, some idle"
    return ""


def _halo(layer: Layer, grid: Sequence[int], nbytes_a_number: float, link: Link) -> float:
    """Return the seconds of one exchange around a layer, for a rank with neighbours all around."""
    window = layer.window
    if window is None:
        return 0.0
    channels, *space = layer.input_shape
    own = [-(-points // parts) for points, parts in zip(space, grid, strict=True)]
    cut = [dim for dim, parts in enumerate(grid) if parts > 1 and window.reach(dim)]
    numbers = sum(window.reach(dim) * math.prod(own) // own[dim] for dim in cut)
    # a halo wider than a block comes from several ranks on each side
    messages = sum(2 * max(1, -(-window.reach(dim) // (2 * own[dim]))) for dim in cut)
    return exchange(channels * numbers * nbytes_a_number, messages, link)


def _team_link(cluster: Cluster, size: int) -> Link:
    return cluster.node_link if size <= cluster.ranks_per_node else cluster.outer


def _team_size(cluster: Cluster, team: int | None) -> int:
    return min(team or cluster.ranks_per_node, cluster.ranks)
