"""What `unisono plan` shows: a table, the assumptions behind it, and a picture of the scaling."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.errors import MissingExtra, PlatformError
from unisono.plan.cluster import Cluster, Link
from unisono.plan.prediction import Impossible, Prediction
from unisono.plan.quantities import write_bytes, write_rate, write_time
from unisono.plan.ways import Curve, rank_counts, scaling
from unisono.plan.workload import Workload

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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


# -- the picture -----------------------------------------------------------------------------------

_STYLES: dict[str, tuple[str, str]] = {
    "data parallel, blocking": ("#1f5fa8", "-"),
    "data parallel, non-blocking": ("#53a2dd", "--"),
    "DASO": ("#c0462c", "-"),
    "spatial (halos)": ("#2f8f57", "-"),
    "tensor (features)": ("#8a5bb5", "-"),
    "graph (halos)": ("#2f8f57", "-"),
    "sharded (FSDP2)": ("#c78a1b", "-"),
    "Bayesian": ("#1f5fa8", "-"),
}
_INK, _FAINT = "#222222", "#777777"


def check_picture(path: Path) -> None:
    """Refuse a picture that could not be written: its kind, its place, or without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra.of("plot", f"--plot {path.name}", str(error)) from error
    kinds = Figure().canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in kinds:
        raise PlatformError.because(
            f"--plot {path}",
            f"no kind of picture ends with {path.suffix!r}"
            if path.suffix
            else "a name without an ending does not say the kind of picture",
            hint=f"--plot {path.with_suffix('.png')}, or .svg, .pdf",
        )
    if path.is_dir() or not path.absolute().parent.is_dir():
        what = f"{path} is a directory" if path.is_dir() else f"there is no {path.parent}"
        raise PlatformError.because(
            f"--plot {path}", what, hint=f"mkdir -p {path.parent}, or --plot {path.name}"
        )
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise PlatformError.because(
            f"--plot {path}", "it may not be written", hint=f"--plot {path.name}"
        )


def draw_scaling(
    path: Path,
    workload: Workload,
    cluster: Cluster,
    batch: float,
    assumptions: Sequence[str],
    *,
    largest: int,
    team: int | None = None,
) -> None:
    """Write a picture of strong and weak scaling, which `check_picture` has let pass.

    Args:
        path: its ending says the kind of picture.
        workload: the model.
        cluster: links and size of a node; its number of ranks is marked.
        batch: samples for each rank of it.
        assumptions: printed below.
        largest: number of ranks to draw.
        team: ranks that share a sample in the ways that do so.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    counts, whole = rank_counts(cluster.ranks_per_node, largest), batch * cluster.ranks
    with mpl.rc_context({"svg.fonttype": "none", "font.family": "DejaVu Sans", "font.size": 10}):
        height = 5.6 + 0.19 * len(assumptions)
        figure = Figure(figsize=(12, height), facecolor="white")
        left, right = figure.subplots(1, 2)
        below = (0.95 + 0.19 * len(assumptions)) / height
        figure.subplots_adjust(
            left=0.065, right=0.985, top=1 - 0.95 / height, bottom=below, wspace=0.16
        )
        title = f"{workload.name}: predicted scaling to {max(counts):,} ranks"
        figure.text(0.065, 1 - 0.42 / height, title, size=14, weight="bold", color=_INK)
        strong = scaling(workload, cluster, whole, counts, strong=True, team=team)
        _strong(left, strong, f"strong scaling: {whole:,.0f} samples in every step")
        weak = scaling(workload, cluster, batch, counts, strong=False, team=team)
        _weak(right, weak, f"weak scaling: {batch:g} samples a rank")
        for axes in (left, right):
            _furnish(axes, cluster.ranks)
        text = "\n".join(f"- {line}" for line in assumptions)
        figure.text(
            0.065, 0.14 / height, text, size=8.5, color=_FAINT, va="bottom", linespacing=1.45
        )
        figure.savefig(path, dpi=130)


def _strong(axes: Axes, curves: Sequence[Curve], title: str) -> None:
    axes.set_title(title, loc="left", size=11, color=_INK)
    most = max((max(curve.ranks) for curve in curves), default=1)
    axes.plot([1, most], [1, most], color="#bbbbbb", linewidth=1, label="ideal")
    _lines(axes, curves)
    axes.set_yscale("log")
    axes.set_ylabel("times as fast as one rank")
    axes.legend(frameon=False, fontsize=9, loc="upper left")


def _weak(axes: Axes, curves: Sequence[Curve], title: str) -> None:
    axes.set_title(title, loc="left", size=11, color=_INK)
    axes.axhline(100, color="#bbbbbb", linewidth=1)
    percent = [Curve(c.way, c.ranks, c.step_s, tuple(100 * g for g in c.gain)) for c in curves]
    _lines(axes, percent)
    axes.set_ylim(0, max([108.0, *(1.05 * max(curve.gain) for curve in percent)]))
    axes.set_ylabel("efficiency, %")


def _lines(axes: Axes, curves: Sequence[Curve]) -> None:
    for number, curve in enumerate(curves):
        color, line = _STYLES.get(curve.way, (_INK, "-"))
        # Curves that lie on each other stay visible: the later, the thinner.
        width = max(1.5, 4.2 - 0.6 * number)
        options: dict[str, Any] = {"color": color, "linestyle": line, "linewidth": width}
        axes.plot(curve.ranks, curve.gain, label=curve.way, **options)


def _furnish(axes: Axes, marked: int) -> None:
    axes.set_xscale("log")
    axes.set_xlabel("ranks")
    axes.grid(True, which="major", color="#e8e8e8", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    ticks = [1, 10, 100, 1000, 10000]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    if marked > 1:
        axes.axvline(marked, color=_FAINT, linewidth=0.8, linestyle=":")
        top = axes.get_ylim()[0]
        axes.annotate(
            f"{marked:,}", (marked, top), xytext=(3, 4), textcoords="offset points",
            size=8, color=_FAINT,
        )  # fmt: skip
