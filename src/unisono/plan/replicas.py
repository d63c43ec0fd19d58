"""Ways in which every rank holds the whole model: data parallel, DASO, sharded, Bayesian. Pure."""

from __future__ import annotations

from dataclasses import replace

from unisono.plan.cluster import Cluster
from unisono.plan.links import all_reduce_between, broadcast
from unisono.plan.overlap import remaining, waiting_after_backward, waiting_in_next_forward
from unisono.plan.prediction import Impossible, Prediction, predicted
from unisono.plan.workload import Workload

__all__ = ["bayes", "daso", "data_parallel", "replica_memory", "sharded"]

GLOBAL_SKIP, BATCHES_TO_WAIT = 4, 1
"""DASO's skips in the first epochs after its warm-up."""


def data_parallel(
    workload: Workload, cluster: Cluster, batch: float, *, blocking: bool = True
) -> Prediction | Impossible:
    """Predict `DataParallel` with `batch` samples a rank, updates at once or when needed."""
    way = f"data parallel, {'blocking' if blocking else 'non-blocking'}"
    if workload.is_bayesian:
        return Impossible(way=way, reason="the model is Bayesian: it has deltas, not gradients")
    forward = cluster.compute(workload.forward.seconds(batch))
    backward = cluster.compute(workload.backward.seconds(batch))
    ready = [bucket.ready * backward for bucket in workload.buckets]
    sums = [cluster.all_reduce(bucket.nbytes) for bucket in workload.buckets]
    times = [each.seconds for each in sums]
    overlap = sum(each.free_s for each in sums) / (sum(times) or 1.0)
    if blocking:
        waiting = waiting_after_backward(ready, times, backward, overlap)
    else:
        needed = [bucket.needed * forward for bucket in workload.buckets]
        waiting = waiting_in_next_forward(ready, times, needed, backward, overlap)
    return predicted(
        way,
        workload,
        cluster,
        batch,
        compute_s=forward + backward + cluster.compute(workload.optimizer_s),
        waiting_s=waiting,
        communication_s=sum(times),
        memory_bytes=replica_memory(workload, batch),
        algorithm=max(sums).algorithm if sums else "-",
    )


def daso(workload: Workload, cluster: Cluster, batch: float) -> Prediction | Impossible:
    """Predict `DASO` between its warm-up and its cool-down, averaged over its cycle."""
    if workload.is_bayesian:
        return Impossible(way="DASO", reason="the model is Bayesian: it has deltas, not gradients")
    node = data_parallel(workload, replace(cluster, nodes=1), batch)
    if isinstance(node, Impossible):
        return node
    nbytes, outer = workload.parameter_bytes, cluster.outer
    between = all_reduce_between(nbytes, cluster.nodes, outer)
    inside = 0.0
    if cluster.nodes > 1:
        inside = broadcast(nbytes, cluster.ranks_per_node, cluster.node_link)
    late = max(0.0, between - BATCHES_TO_WAIT * node.step_s)
    exchange = remaining(between, late, outer.overlap) + inside
    return predicted(
        "DASO",
        workload,
        cluster,
        batch,
        compute_s=node.compute_s,
        waiting_s=node.waiting_s + exchange / GLOBAL_SKIP,
        communication_s=node.communication_s + (between + inside) / GLOBAL_SKIP,
        memory_bytes=replica_memory(workload, batch) + nbytes * (cluster.nodes > 1),
        algorithm=node.algorithm,
        note=f"nodes meet every {GLOBAL_SKIP} batches" if cluster.nodes > 1 else "one node",
    )


def sharded(workload: Workload, cluster: Cluster, batch: float) -> Prediction | Impossible:
    """Predict parameters, gradients and optimizer state cut over all ranks (torch's FSDP2).

    Parameters are gathered for forward and again for backward, gradients reduce-scattered, in parts
    of a bucket; the next part travels while one is used, the first layer's cannot.
    """
    way = "sharded (FSDP2)"
    if workload.is_bayesian:
        return Impossible(way=way, reason="FSDP2 shards torch modules")
    nbytes = workload.parameter_bytes
    parts = [cluster.all_gather(bucket.nbytes) for bucket in workload.buckets]
    once = sum(part.seconds for part in parts)
    overlap = sum(part.free_s for part in parts) / (once or 1.0)
    compute = cluster.compute(workload.compute(batch))
    biggest = max((layer.parameter_bytes for layer in workload.layers), default=nbytes)
    first = workload.layers[0].parameter_bytes if workload.layers else nbytes
    ideal = max(3 * once - compute, cluster.all_gather(first).seconds)
    held = (2 * nbytes + workload.state_bytes) / cluster.ranks
    return predicted(
        way,
        workload,
        cluster,
        batch,
        # Each rank updates only its own part.
        compute_s=compute - cluster.compute(workload.optimizer_s) * (1 - 1 / cluster.ranks),
        waiting_s=remaining(3 * once, ideal, overlap),
        communication_s=3 * once,
        memory_bytes=held
        + (biggest if cluster.ranks > 1 else 0)
        + batch * workload.activation_bytes,
        algorithm=max(parts).algorithm if parts else "-",
        note="torch's fully_shard on an axis of the mesh",
    )


def bayes(workload: Workload, cluster: Cluster, batch: float) -> Prediction | Impossible:
    """Predict `DDPSequential`: one sum of all deltas of means and variances after backward."""
    if not workload.is_bayesian:
        return Impossible(way="Bayesian", reason="needs a net of unisono.bayes: --model bayes")
    seconds, _, algorithm = cluster.all_reduce(workload.sent_bytes)
    return predicted(
        "Bayesian",
        workload,
        cluster,
        batch,
        compute_s=cluster.compute(workload.compute(batch)),
        waiting_s=seconds,
        communication_s=seconds,
        memory_bytes=replica_memory(workload, batch),
        algorithm=algorithm,
        note="deltas of means and variances",
    )


def replica_memory(workload: Workload, batch: float) -> float:
    """Return the bytes of a rank that holds everything; gradients live in their buckets."""
    held = workload.parameter_bytes + workload.sent_bytes + workload.state_bytes
    return held + batch * workload.activation_bytes
