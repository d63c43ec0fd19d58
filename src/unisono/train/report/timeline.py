"""A few steps of a run as lanes, one a rank: which to show, and what is in them. Pure."""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

SHOWN_STEPS = 9
"""Steps that can be looked at, around a typical one."""
SHOWN_LANES = 32
"""Ranks whose lanes are shown."""
SHOWN_EVENTS = 6_000
"""Bars of a report; steps that hold more are cut."""


def step_ends(parts: Sequence[Mapping[str, Any]], logged: Sequence[float]) -> list[float]:
    """Return when steps ended, in nanoseconds: as logged by rank 0, else as its optimizer did."""
    if len(logged) > 1:
        return [at * 1e9 for at in logged]
    return list(parts[0].get("marks", ())) if parts else []


def choose_steps(ends: Sequence[float], known_from: float) -> tuple[int, int, int]:
    """Return the first and last step to show and the typical one among them, as places in `ends`.

    A typical step takes the median time; it is looked for among those whose collectives are all
    kept, that is from `known_from` on, and not among the first few, which warm up.
    """
    first = max(bisect_left(ends, known_from), min(3, len(ends) - 2))
    took = [b - a for a, b in pairwise(ends)]
    usual = statistics.median(took[first:])
    middle = (first + len(took) - 1) / 2
    typical = min(
        range(first, len(took)),
        key=lambda i: (round(abs(took[i] - usual) / usual, 1) if usual else 0, abs(i - middle)),
    )
    begin = max(first, min(typical - SHOWN_STEPS // 2, len(took) - SHOWN_STEPS))
    return begin, min(len(took), begin + SHOWN_STEPS), typical


def build(parts: Sequence[Mapping[str, Any]], logged: Sequence[float]) -> dict[str, Any] | None:
    """Return the steps to show and the lanes of all ranks, in seconds; None if there is nothing.

    Args:
        parts: what each rank has measured.
        logged: seconds at which rank 0 logged.
    """
    events = [(e["t_start"], e["t_end"]) for part in parts for e in part.get("events", ())]
    spans = [(a, b) for part in parts for _, a, b in part.get("spans", ())]
    if not events and not spans:
        return None
    known_from = max(min((a for a, _ in some), default=0) for some in (events, spans) if some)
    ends = step_ends(parts, logged)
    usable = [at for at in ends if at >= known_from]
    if len(usable) > 1:
        begin, end, typical = choose_steps(ends, known_from)
        steps = [
            {"number": i + 1, "begin": ends[i] / 1e9, "end": ends[i + 1] / 1e9}
            for i in range(begin, end)
        ]
        shown = typical - begin
    else:  # nobody said where a step ends: all of it
        edges = [t for pair in (*events, *spans) for t in pair]
        steps = [{"number": None, "begin": min(edges) / 1e9, "end": max(edges) / 1e9}]
        shown = 0
    low, high = steps[0]["begin"] * 1e9, steps[-1]["end"] * 1e9
    shown_parts = parts[:SHOWN_LANES]
    lanes = [_lane(part, low, high, SHOWN_EVENTS // len(shown_parts)) for part in shown_parts]
    return {"steps": steps, "shown": shown, "lanes": lanes}


def _lane(part: Mapping[str, Any], low: float, high: float, limit: int) -> dict[str, Any]:
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


def shares(
    parts: Sequence[Mapping[str, Any]], lines: Mapping[int, Sequence[Mapping[str, Any]]]
) -> list[dict[str, Any]]:
    """Return for each rank the seconds of computing, moving data and waiting for other ranks.

    From the first step that was logged to the last; else from the optimizer's first step to its
    last; else over the whole record.
    """
    rows: list[dict[str, Any]] = []
    for part in parts:
        own = [line for line in lines.get(part["rank"], ()) if line["a"] == part.get("attempt", 0)]
        if len(own) > 1:
            first, last = own[0], own[-1]
            seconds = last["t"] - first["t"]
            blocked = last["blocked_s"] - first["blocked_s"]
            wait = last["wait_s"] - first["wait_s"]
        elif steps := part.get("steps"):
            seconds, blocked, wait = steps["seconds"], steps["blocked_s"], steps["wait_s"]
        elif "ended_s" in part:
            seconds = part["ended_s"] - part["began_s"]
            blocked, wait = part["blocked_s"], part["wait_s"]
        else:
            continue
        if seconds > 0:
            blocked = min(blocked, seconds)
            wait = min(wait, blocked)
            rows.append(
                {
                    "rank": part["rank"],
                    "compute": seconds - blocked,
                    "move": blocked - wait,
                    "wait": wait,
                    "share": blocked / seconds,
                }
            )
    return rows


def call_table(parts: Sequence[Mapping[str, Any]], limit: int = 12) -> list[dict[str, Any]]:
    """Return the collectives of all ranks summed up by operation and source line, slowest first."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for part in parts:
        for sums in part.get("sums", ()):
            site = Path(sums["site"]).name
            key = sums["op"], "" if site.startswith("<") else site
            row = rows.setdefault(
                key,
                {"op": key[0], "site": key[1], "calls": 0, "bytes": 0, "seconds": 0.0, "wait": 0.0},
            )
            row["calls"] += sums["calls"]
            row["bytes"] += sums["bytes"]
            row["seconds"] += sums["blocked_ns"] / 1e9
            row["wait"] += sums["wait_ns"] / 1e9
    return sorted(rows.values(), key=lambda row: -row["seconds"])[:limit]
