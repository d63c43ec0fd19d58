"""What `unisono plan` shows: a table, and the assumptions behind it."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.plan.cluster import Cluster, Link
from unisono.plan.prediction import Impossible, Prediction
from unisono.plan.quantities import write_bytes, write_rate, write_time
from unisono.plan.workload import Workload

_COLUMNS = ("way", "step", "samples/s", "waiting", "memory", "efficiency", "gradients", "notes")


def table(predictions: Sequence[Prediction | Impossible]) -> str:
    """Return a line for each way, and below why others are not possible."""
    rows = [_COLUMNS] + [_row(each) for each in predictions if isinstance(each, Prediction)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    lines = [
        "  ".join(
            cell.ljust(width) if i in (0, 6, 7) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    if any(each.efficiency > 1.0005 for each in predictions if isinstance(each, Prediction)):
        lines.append(
            "efficiency above 100%: ranks share the optimizer's work, which a rank alone does whole"
        )
    out = [each for each in predictions if isinstance(each, Impossible)]
    if out:
        width = max(len(each.way) for each in out)
        lines += ["", "not possible:"] + [f"  {each.way:{width}}  {each.reason}" for each in out]
    return "\n".join(lines)


def _row(each: Prediction) -> tuple[str, ...]:
    return (
        each.way,
        write_time(each.step_s),
        f"{each.samples_per_s:,.0f}",
        f"{each.communication_share:.1%}",
        write_bytes(each.memory_bytes),
        f"{each.efficiency:.1%}",
        each.algorithm,
        each.note,
    )


def assumptions(workload: Workload, cluster: Cluster, batch: float, machine: str) -> list[str]:
    """Return what the figures rest on, one sentence each."""
    seconds = write_time(workload.compute(batch))
    lines = [
        (
            f"{workload.name}: {write_bytes(workload.parameter_bytes)} of parameters; "
            f"{batch:g} samples take one core {seconds}, measured here"
        ),
        f"{cluster.nodes} x {cluster.ranks_per_node} ranks"
        + (f" on {cluster.cores_per_node} cores a node" if cluster.cores_per_node else "")
        + f", each {cluster.rank_speed:g} x as fast as that core",
        f"in a node {_described(cluster.inner)}",
    ]
    if cluster.nodes > 1:
        lines.append(
            f"between nodes {_described(cluster.outer)}; one link a node, no congestion behind it"
        )
    alone = "" if cluster.cores_per_node else "ranks of a node do not slow each other down; "
    return [*lines, f"{alone}no stragglers, no input", f"links: {machine}"]


def _described(link: Link) -> str:
    hidden = f"{link.overlap:.0%} of it beside computing" if link.overlap else "never hidden"
    return (
        f"{link.name}: {write_time(link.latency_s)} + n / {write_rate(link.bytes_per_s)}, {hidden}"
    )
