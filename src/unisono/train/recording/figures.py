"""The figures of a report, as plain data: curves, shares of time, a timeline, tables. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from unisono.launch.logs import tail
from unisono.train.recording import directory as directories
from unisono.train.recording import reading
from unisono.train.recording.reading import Metrics, RecordedRun, Series

POINTS = 800
"""Points of a curve; longer ones are thinned, the band keeps their extremes."""
LOG_BYTES = 20_000
"""Bytes from the end of each rank's log."""
LOGS_SHOWN = 64
SHOWN_STEPS = 9
"""Steps that can be looked at, around a typical one."""
SHOWN_LANES = 32
"""Ranks whose lanes are shown."""
SHOWN_CALLS = 12
"""Rows of the table of collectives."""
SHOWN_EVENTS = 6_000
"""Bars of a report; steps that hold more are cut."""
_PLACE = ("rank", "host", "device", "pid", "threads", "status", "peak_mb")
"""What is shown of each rank."""

Part = Mapping[str, Any]
"""What one rank is and has measured."""
Lines = Sequence[Mapping[str, Any]]
"""What one rank has logged."""


def report_data(run: RecordedRun, against: Sequence[RecordedRun] = ()) -> dict[str, Any]:
    """Return everything that the page of a run shows; `against` are drawn beside it."""
    return {
        **_compared(run),
        "status": run.status,
        "trouble": run.trouble,
        "started": run.config.get("started", ""),
        "command": " ".join(run.config.get("command", ())),
        "seconds": run.seconds,
        "attempts": run.attempts,
        "steps": len(run.stepping.steps),
        "calls": call_table(run.parts),
        "averaging": averaging_table(run.parts),
        "timeline": timeline(run.parts, run.lines.get(0, ())),
        "places": [{name: part.get(name) for name in _PLACE} for part in run.parts],
        "facts": fact_tables(run),
        "logs": [
            {"rank": rank, "text": log_tail(directories.rank_file(run.directory, rank, "log"))}
            for rank in directories.ranks_in(run.directory)[:LOGS_SHOWN]
        ],
        "against": [_compared(other) for other in against],
        "comparison": directories.read_json(run.directory / directories.COMPARISON),
    }


def _compared(run: RecordedRun) -> dict[str, Any]:
    """Return what is drawn of a run and of those beside it."""
    unit, at, rates = reading.throughput(run.stepping)
    return {
        "name": run.config.get("name", run.directory.name),
        "ranks": len(run.parts),
        "threads": run.parts[0].get("threads") if run.parts else None,
        "metrics": curves(run.merged),
        "throughput": {"unit": unit, "steps": at, "values": finite(rates)},
        "rate": reading.overall_throughput(run.stepping),
        "shares": shares(run.parts, run.lines),
    }


# Curves.


def curves(merged: Metrics) -> list[dict[str, Any]]:
    """Return the curves of all metrics, `samples` left out: they show as throughput."""
    return [
        {"name": name, **thinned(series)}
        for name, series in merged.series.items()
        if name != reading.SAMPLES
    ]


def thinned(series: Series, points: int = POINTS) -> dict[str, Any]:
    """Return a series of at most `points` points: means of neighbours, extremes of their bands.

    What is not a finite number becomes None, which the page draws as a gap and counts.
    """
    size = len(series.steps)
    stride = max(1, math.ceil(size / points))
    if stride == 1:
        return {name: finite(values) for name, values in asdict(series).items()}
    groups = [slice(i, i + stride) for i in range(0, size, stride)]
    return {
        "steps": [series.steps[g][-1] for g in groups],
        "seconds": [series.seconds[g][-1] for g in groups],
        "mean": finite([sum(series.mean[g]) / len(series.mean[g]) for g in groups]),
        "low": finite([min(series.low[g]) for g in groups]),
        "high": finite([max(series.high[g]) for g in groups]),
    }


def finite(values: Sequence[float]) -> list[float | None]:
    """Return the values with None for those that are not finite, for which JSON has no word."""
    return [value if math.isfinite(value) else None for value in values]


# Where the time of a rank went.


def step_ends(part: Part, lines: Lines) -> list[tuple[float, float, float]]:
    """Return where steps of a rank ended: seconds, and those blocked and waited until then.

    As the rank logged in its last attempt, else as an optimizer of it stepped.
    """
    attempt = part.get("attempt", 0)
    ends = [(x["t"], x["blocked_s"], x["wait_s"]) for x in lines if x["a"] == attempt]
    if len(ends) < 2:
        marks = part.get("marks", ())
        ends = [(at / 1e9, blocked / 1e9, wait / 1e9) for at, blocked, wait in marks]
    return ends if len(ends) > 1 else []


def shares(parts: Sequence[Part], lines: Mapping[int, Lines]) -> list[dict[str, Any]]:
    """Return for each rank the seconds of computing, moving data and waiting for other ranks.

    From the end of its first step to that of its last; without steps over the whole record.
    """
    rows: list[dict[str, Any]] = []
    for part in parts:
        ends = step_ends(part, lines.get(part["rank"], ()))
        if not ends and "ended_s" in part:
            whole = (part["ended_s"], part["blocked_s"], part["wait_s"])
            ends = [(part["began_s"], 0.0, 0.0), whole]
        if not ends or ends[-1][0] <= ends[0][0]:
            continue
        seconds, blocked, wait = (b - a for a, b in zip(ends[0], ends[-1], strict=True))
        blocked = min(blocked, seconds)
        wait = min(wait, blocked)
        times = {"compute": seconds - blocked, "move": blocked - wait, "wait": wait}
        rows.append({"rank": part["rank"], **times, "share": blocked / seconds})
    return rows


def choose_steps(ends: Sequence[float], known_from: float) -> tuple[int, int, int]:
    """Return the first and last step to show and the typical one among them, as places in `ends`.

    A typical step takes the median time; it is looked for among those whose collectives are all
    kept, that is from `known_from` on, and not among the first few, which warm up.
    """
    first = max(bisect_left(ends, known_from), min(3, len(ends) - 2))
    took = [b - a for a, b in pairwise(ends)]
    order = sorted(range(first, len(took)), key=took.__getitem__)
    typical = order[len(order) // 2]
    begin = max(first, min(typical - SHOWN_STEPS // 2, len(took) - SHOWN_STEPS))
    return begin, min(len(took), begin + SHOWN_STEPS), typical


def timeline(parts: Sequence[Part], lines: Lines) -> dict[str, Any] | None:
    """Return the steps to show and the lanes of all ranks, in seconds; None if there is nothing.

    Args:
        parts: what each rank has measured.
        lines: what rank 0 has logged.
    """
    events = [(e["t_start"], e["t_end"]) for part in parts for e in part.get("events", ())]
    spans = [(a, b) for part in parts for _, a, b in part.get("spans", ())]
    if not events and not spans:
        return None
    known_from = max(min((a for a, _ in some), default=0) for some in (events, spans) if some) / 1e9
    ends = [at for at, _, _ in step_ends(parts[0], lines)]
    if sum(at >= known_from for at in ends) > 1:
        begin, end, typical = choose_steps(ends, known_from)
        steps = [{"number": i + 1, "begin": ends[i], "end": ends[i + 1]} for i in range(begin, end)]
        shown = typical - begin
    else:  # no step was marked: all of it
        edges = [t / 1e9 for pair in (*events, *spans) for t in pair]
        steps = [{"number": None, "begin": min(edges), "end": max(edges)}]
        shown = 0
    low, high = steps[0]["begin"] * 1e9, steps[-1]["end"] * 1e9
    limit = SHOWN_EVENTS // len(parts[:SHOWN_LANES])
    lanes = [_lane(part, low, high, limit) for part in parts[:SHOWN_LANES]]
    return {"steps": steps, "shown": shown, "lanes": lanes}


def _lane(part: Part, low: float, high: float, limit: int) -> dict[str, Any]:
    """Return what one rank did between two moments."""
    inside = [e for e in part.get("events", ()) if e["t_end"] >= low and e["t_start"] <= high]
    return {
        "rank": part["rank"],
        "events": [
            {
                "name": e["op"],
                "begin": e["t_start"] / 1e9,
                "end": e["t_end"] / 1e9,
                "wait": e["wait_ns"] / 1e9,
                "bytes": e["sent"] + e["received"],
                "async": e["is_async"],
                "site": Path(e["site"]).name,
            }
            for e in inside[:limit]
        ],
        "spans": [
            {"name": name, "begin": a / 1e9, "end": b / 1e9}
            for name, a, b in part.get("spans", ())
            if b >= low and a <= high
        ][:limit],
    }


# Tables.


def call_table(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Return the collectives of all ranks summed up by operation and source line, slowest first."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for part in parts:
        for sums in part.get("sums", ()):
            site = Path(sums["site"]).name
            key = sums["op"], "" if site.startswith("<") else site
            start = {"op": key[0], "site": key[1], "calls": 0, "bytes": 0}
            row = rows.setdefault(key, {**start, "seconds": 0.0, "wait": 0.0})
            row["calls"] += sums["calls"]
            row["bytes"] += sums["bytes"]
            row["seconds"] += sums["blocked_ns"] / 1e9
            row["wait"] += sums["wait_ns"] / 1e9
    return sorted(rows.values(), key=lambda row: -row["seconds"])[:SHOWN_CALLS]


def averaging_table(parts: Sequence[Part]) -> list[dict[str, Any]]:
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
    lines = (line.rstrip("\r").rpartition("\r")[2] for line in tail(path, limit).split("\n"))
    return "\n".join(lines).strip("\n")
