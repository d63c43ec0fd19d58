"""A trace of collectives as plain data: its table, and its file for Perfetto. Loads no torch.

The events are those of `unisono.comm.trace`, as dicts; times are nanoseconds on one clock.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["chrome_events", "chrome_spans", "load", "table", "write"]

_COLUMNS = ("op", "calls", "bytes", "total ms", "wait ms", "share", "slowest", "site")
_SPANS = 1_000_000
"""Number of the lane of spans, beside those of groups."""


def table(events: Sequence[dict[str, Any]]) -> str:
    """Return a table per (operation, source line): calls, bytes, time, wait, share of the time.

    `slowest` is the rank that waited least there: the one the others waited for.
    """
    rows: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        rows[event["op"], event["site"]].append(event)
    overall = sum(e["t_end"] - e["t_start"] for e in events) or 1
    lines: list[tuple[str, ...]] = []
    by_time = sorted(rows.items(), key=lambda kv: -sum(e["t_end"] - e["t_start"] for e in kv[1]))
    for (op, site), calls in by_time:
        total = sum(e["t_end"] - e["t_start"] for e in calls)
        waits: dict[int, int] = defaultdict(int)
        for e in calls:
            waits[e["rank"]] += e["wait_ns"]
        lines.append(
            (
                op,
                str(len(calls)),
                str(sum(e["sent"] + e["received"] for e in calls)),
                f"{total / 1e6:.3f}",
                f"{sum(waits.values()) / 1e6:.3f}",
                f"{100 * total / overall:.0f}%",
                str(min(waits, key=lambda rank: waits[rank])),
                Path(site).name or "-",
            )
        )
    widths = [max(len(row[i]) for row in [_COLUMNS, *lines]) for i in range(len(_COLUMNS))]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i in (0, len(_COLUMNS) - 1) else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in [_COLUMNS, *lines]
    )


def chrome_events(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the events in the Chrome trace format: pid is the rank, tid the group.

    Flow arrows join the calls of one collective over the ranks.
    """
    groups = {name: i for i, name in enumerate(sorted({e["group"] for e in events}))}
    out: list[dict[str, Any]] = []
    for rank in sorted({e["rank"] for e in events}):
        name = {"name": f"rank {rank}"}
        out.append({"ph": "M", "name": "process_name", "pid": rank, "args": name})
        for group, tid in groups.items():
            args = {"name": group}
            out.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": args})
    first: set[tuple[str, int]] = set()
    for e in sorted(events, key=lambda e: e["t_start"]):
        where = {"pid": e["rank"], "tid": groups[e["group"]]}
        start = e["t_start"] / 1e3
        out.append(
            {"ph": "X", "cat": "collective", "name": e["op"], "ts": start, **where}
            | {"dur": max((e["t_end"] - e["t_start"]) / 1e3, 0.001), "args": e}
        )
        call = (e["group"], e["number"])
        if not e["number"]:
            continue
        flow = {"cat": "join", "name": "same call", "id": f"{call[0]}#{call[1]}", "ts": start}
        out.append(flow | where | ({"ph": "f", "bp": "e"} if call in first else {"ph": "s"}))
        first.add(call)
    return out


def chrome_spans(spans: Mapping[int, Sequence[tuple[str, int, int]]]) -> list[dict[str, Any]]:
    """Return named spans of ranks (name, begin, end) in the same format, in a lane of their own."""
    out: list[dict[str, Any]] = []
    for rank, rank_spans in spans.items():
        where = {"pid": rank, "tid": _SPANS}
        if rank_spans:
            out.append({"ph": "M", "name": "thread_name", **where, "args": {"name": "spans"}})
        for name, begin, end in rank_spans:
            times = {"ts": begin / 1e3, "dur": max((end - begin) / 1e3, 0.001)}
            out.append({"ph": "X", "cat": "span", "name": name, **times, **where})
    return out


def load(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read the collectives back from a saved file."""
    saved = json.loads(Path(path).read_text(encoding="utf-8"))
    return [e["args"] for e in saved["traceEvents"] if e["ph"] == "X" and e["cat"] == "collective"]


def write(
    path: str | os.PathLike[str],
    events: Sequence[dict[str, Any]],
    spans: Mapping[int, Sequence[tuple[str, int, int]]] | None = None,
) -> None:
    """Write collectives, and spans by rank, to `path` in the Chrome trace format. Local."""
    lanes = [*chrome_events(events), *chrome_spans(spans or {})]
    content = {"traceEvents": lanes, "displayTimeUnit": "ms"}
    Path(path).write_text(json.dumps(content), encoding="utf-8")
