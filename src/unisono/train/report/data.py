"""What a report shows, as plain data: read from the directory of a run, thinned for the screen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from unisono.train.recording import directory as directories
from unisono.train.report import metrics, timeline

POINTS = 800
"""Points of a curve; longer ones are thinned, the band keeps their extremes."""
LOG_BYTES = 20_000
"""Bytes from the end of each rank's log."""
LOGS_SHOWN = 64
_PLACE = ("rank", "host", "device", "pid", "threads", "status", "peak_mb")
"""What is shown of each rank."""
_CONSEQUENCES = ("RankFailed", "RankTimeout", "Stopped")
"""Types of errors that only say that another rank went away."""


@dataclass(frozen=True)
class RecordedRun:
    """A directory, read."""

    directory: Path
    config: dict[str, Any]
    parts: list[dict[str, Any]]
    """What each rank is and has measured, by rank."""
    lines: dict[int, list[dict[str, Any]]]
    """What each rank has logged."""
    merged: metrics.Metrics
    began_s: float
    """When the first rank began, or was first heard of."""

    @classmethod
    def read(
        cls, directory: Path, readers: dict[int, metrics.LineReader] | None = None
    ) -> RecordedRun:
        """Read what ranks have written so far; `readers` remember what they have read before."""
        ranks = directories.ranks_in(directory)
        readers = {} if readers is None else readers
        for rank in ranks:
            if rank not in readers:
                readers[rank] = metrics.LineReader(directories.lines_path(directory, rank))
        parts = [directories.read_json(directories.part_path(directory, r)) for r in ranks]
        lines = {rank: readers[rank].read_new().lines for rank in ranks}
        config = directories.read_json(directory / directories.CONFIG)
        for part in parts[:1]:
            config["config"] = {**config.get("config", {}), **part.get("config", {})}
        parts = [part for part in parts if part]
        # Parts are of the last attempt; what an earlier one logged came before it.
        signs = [part["began_s"] for part in parts]
        signs += [line["t"] for own in lines.values() for line in own[:1]]
        began_s = min(signs, default=0.0)
        return cls(directory, config, parts, lines, metrics.merge(lines, began_s), began_s)

    @property
    def stepping(self) -> metrics.Metrics:
        """Where steps ended: as logged, else as the optimizer of the first rank made them."""
        marks = [] if self.merged.steps or not self.parts else self.parts[0].get("marks", [])
        if not marks:
            return self.merged
        last = self.parts[0]["mark_count"]
        seconds = [at / 1e9 - self.began_s for at in marks]
        return metrics.Metrics(list(range(last - len(marks), last)), seconds, {})

    @property
    def status(self) -> str:
        """`done`, `failed` or `running`, as the ranks say."""
        said = {part["status"] for part in self.parts}
        if not said or "failed" in said:
            return "failed"
        return "done" if said == {"done"} else "running"

    @property
    def trouble(self) -> str:
        """The first line of what went wrong on a rank, best the one that others fell over."""
        told = [
            (part["rank"], part["trouble"].strip().splitlines()[-1])
            for part in self.parts
            if part["trouble"]
        ]
        told.sort(key=lambda pair: pair[1].partition(":")[0].split(".")[-1] in _CONSEQUENCES)
        return f"rank {told[0][0]}: {told[0][1]}" if told else ""

    @property
    def attempts(self) -> int:
        """How often the run was started."""
        return max((part["attempt"] for part in self.parts), default=0) + 1

    @property
    def seconds(self) -> float:
        """From the moment the first rank began to the last sign of life of any rank."""
        ends = [part["ended_s"] - self.began_s for part in self.parts if "ended_s" in part]
        return max([*ends, *self.merged.seconds[-1:]], default=0.0)


def report_data(run: RecordedRun, against: Sequence[RecordedRun] = ()) -> dict[str, Any]:
    """Return everything that the page of a run shows; `against` are drawn beside it."""
    attempt = run.parts[0]["attempt"] if run.parts else 0
    logged = [line["t"] for line in run.lines.get(0, ()) if line["a"] == attempt]
    return {
        **_compared(run),
        "status": run.status,
        "trouble": run.trouble,
        "started": run.config.get("started", ""),
        "command": " ".join(run.config.get("command", ())),
        "seconds": run.seconds,
        "attempts": run.attempts,
        "steps": len(run.stepping.steps),
        "calls": timeline.call_table(run.parts),
        "averaging": averaging_table(run.parts),
        "timeline": timeline.build(run.parts, logged),
        "layouts": run.parts[0].get("layouts", []) if run.parts else [],
        "places": [{name: part.get(name) for name in _PLACE} for part in run.parts],
        "facts": fact_tables(run),
        "logs": [
            {"rank": rank, "text": log_tail(directories.log_path(run.directory, rank))}
            for rank in directories.ranks_in(run.directory)[:LOGS_SHOWN]
        ],
        "against": [_compared(other) for other in against],
    }


def _compared(run: RecordedRun) -> dict[str, Any]:
    """Return what is drawn of a run and of those beside it."""
    unit, at, rates = metrics.throughput(run.stepping)
    return {
        "name": run.config.get("name", run.directory.name),
        "ranks": len(run.parts),
        "threads": run.parts[0].get("threads") if run.parts else None,
        "metrics": curves(run.merged),
        "throughput": {"unit": unit, "steps": at, "values": _finite(rates)},
        "rate": metrics.overall_throughput(run.stepping),
        "shares": timeline.shares(run.parts, run.lines),
    }


def averaging_table(parts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what averaging gradients cost: a row for each rank and module whose it averaged.

    Shares are of the time that the rank was recorded.
    """
    rows: list[dict[str, Any]] = []
    for part in parts:
        seconds = part["ended_s"] - part["began_s"] if "ended_s" in part else 0.0
        for costs in part.get("averaging", ()):
            steps, row = max(1, costs["steps"]), {"rank": part["rank"]}
            row |= {name: costs[name] for name in ("module", "ranks", "steps", "buckets")}
            row["bytes_per_step"] = round(costs["bytes"] / steps)
            for when in ("backward", "forward"):
                waited = costs[f"wait_{when}_s"]
                row[f"{when}_s_per_step"] = waited / steps
                row[f"{when}_share"] = waited / seconds if seconds > 0 else 0.0
            rows.append(row)
    return rows


def curves(merged: metrics.Metrics) -> list[dict[str, Any]]:
    """Return the curves of all metrics, `samples` left out: they show as throughput."""
    return [
        {"name": name, **thinned(series)}
        for name, series in merged.series.items()
        if name != metrics.SAMPLES
    ]


def thinned(series: metrics.Series, points: int = POINTS) -> dict[str, Any]:
    """Return a series of at most `points` points: means of neighbours, extremes of their bands.

    What is not a finite number becomes None, which the page draws as a gap and counts.
    """
    size = len(series.steps)
    stride = max(1, math.ceil(size / points))
    if stride == 1:
        return {name: _finite(values) for name, values in asdict(series).items()}
    groups = [slice(i, i + stride) for i in range(0, size, stride)]
    return {
        "steps": [series.steps[g][-1] for g in groups],
        "seconds": [series.seconds[g][-1] for g in groups],
        "mean": _finite([sum(series.mean[g]) / len(series.mean[g]) for g in groups]),
        "low": _finite([min(series.low[g]) for g in groups]),
        "high": _finite([max(series.high[g]) for g in groups]),
    }


def fact_tables(run: RecordedRun) -> dict[str, dict[str, str]]:
    """Return the tables of machine, versions and settings."""
    config = run.config
    git = config.get("git")
    versions = dict(config.get("versions", {}))
    if git:
        changed = ", files changed since" if git["is_dirty"] else ""
        versions["git"] = f"{git['commit'][:12]} ({git['branch']}{changed})"
    first = run.parts[0] if run.parts else {}
    hosts = sorted({part["host"] for part in run.parts})
    world = {
        "ranks": str(first.get("size", 0)),
        "hosts": ", ".join(hosts),
        "devices": ", ".join(sorted({part["device"] for part in run.parts})),
        "backend": str(first.get("backend", "")),
        "threads of a rank": str(first.get("threads", "")),
        "attempts": str(run.attempts),
        "started": config.get("started", ""),
        "command": " ".join(config.get("command", ())),
        "directory": config.get("directory", ""),
    }
    settings = {name: str(value) for name, value in config.get("config", {}).items()}
    return {
        "Run": world,
        "Settings": settings,
        "Machine": config.get("machine", {}),
        "Versions": versions,
    }


def log_tail(path: Path, limit: int = LOG_BYTES) -> str:
    """Return the end of a log; of a line that was written over (a progress bar), the last state."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - limit))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = (line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    return "\n".join(lines).strip("\n")


def _finite(values: Sequence[float]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values]
