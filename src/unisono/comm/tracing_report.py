"""Making a trace readable: the table, and the file for chrome://tracing and Perfetto."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore

from unisono.comm.tracing import Event
from unisono.comm.watchdog import default_store

_PINGS = 16
_COLUMNS = ("op", "calls", "bytes", "total ms", "wait ms", "share", "slowest", "site")


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


def save(path: str | os.PathLike[str], events: list[Event]) -> None:
    """Gather `events` of all ranks on rank 0 and write them there. Collective over the world."""
    mine = [asdict(e) for e in events]
    if not dist.is_initialized() or dist.get_world_size() == 1:
        write(path, mine)
        return
    store = PrefixStore("unisono/trace", default_store())
    rank, size = dist.get_rank(), dist.get_world_size()
    round_number = (store.add("round", 1) - 1) // size
    store = PrefixStore(str(round_number), store)
    offset = clock_offset_ns(store, rank, size)
    for event in mine:
        event["t_start"] += offset
        event["t_end"] += offset
    if rank != 0:
        store.set(f"events/{rank}", json.dumps(mine))
        store.wait(["written"])
        return
    everybody = list(mine)
    for other in range(1, size):
        everybody += json.loads(store.get(f"events/{other}"))
        store.delete_key(f"events/{other}")
    write(path, everybody)
    store.set("written", "1")


def save_alone(path: str | os.PathLike[str], events: list[Event]) -> None:
    """Write `events` of this rank only, to `path` or, beside other ranks, `path.rank3`. Local."""
    ranks = {event.rank for event in events}
    alone = not dist.is_initialized() and ranks <= {0}
    name = str(path) if alone else f"{path}.rank{min(ranks, default=0)}"
    write(name, [asdict(e) for e in events])


def clock_offset_ns(store: PrefixStore, rank: int, size: int) -> int:
    """Return what to add to this rank's clock to get rank 0's: median over some ping-pongs."""
    if rank == 0:
        for other in range(1, size):
            for i in range(_PINGS):
                store.wait([f"ping/{other}/{i}"])
                store.set(f"pong/{other}/{i}", str(time.perf_counter_ns()))
        return 0
    offsets: list[float] = []
    for i in range(_PINGS):
        before = time.perf_counter_ns()
        store.set(f"ping/{rank}/{i}", "")
        there = int(store.get(f"pong/{rank}/{i}"))
        offsets.append(there - (before + time.perf_counter_ns()) / 2)
    return round(statistics.median(offsets))


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
        call = (e["group"], e["seq"])
        flow = {"cat": "join", "name": "same call", "id": f"{call[0]}#{call[1]}", "ts": start}
        out.append(flow | where | ({"ph": "f", "bp": "e"} if call in first else {"ph": "s"}))
        first.add(call)
    return out


def load(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read the events back from a saved file."""
    saved = json.loads(Path(path).read_text(encoding="utf-8"))
    return [e["args"] for e in saved["traceEvents"] if e["ph"] == "X"]


def write(path: str | os.PathLike[str], events: Sequence[dict[str, Any]]) -> None:
    """Write `events` to `path` in the Chrome trace format. Local."""
    content = {"traceEvents": chrome_events(events), "displayTimeUnit": "ms"}
    Path(path).write_text(json.dumps(content), encoding="utf-8")
