"""Bringing the events of all ranks together, on one clock, into one file that can be written."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore

from unisono.comm.tracing import Event
from unisono.comm.watchdog import default_store, standing
from unisono.environment import detect
from unisono.errors import UnisonoError
from unisono.trace_file import write

_PINGS = 16


def check_path(path: str | os.PathLike[str]) -> None:
    """Refuse a file that could not be written at the end. Local.

    Rank 0 writes it; ranks of other hosts need not have its folder.
    """
    environment = detect()
    rank = dist.get_rank() if dist.is_initialized() else environment.rank
    problem = _obstacle(path) if rank == 0 or environment.nodes == 1 else None
    if problem is not None:
        raise _not_written(path, problem)


def save(path: str | os.PathLike[str], events: list[Event]) -> None:
    """Gather `events` of all ranks on rank 0 and write them there. Collective over the world.

    Where that cannot be, all ranks raise.
    """
    if standing() and _is_alone():
        save_alone(path, events)  # ranks that have groups, but no world to gather over
        return
    mine = [asdict(e) for e in events]
    problem = _try_to_write(path, mine) if _is_alone() else _gather_and_write(path, mine)
    if problem:
        raise _not_written(path, problem)


def _is_alone() -> bool:
    return not dist.is_initialized() or dist.get_world_size() == 1


def _gather_and_write(path: str | os.PathLike[str], mine: list[dict[str, Any]]) -> str:
    """Bring all events to rank 0, which writes; returns what is in the way, the same everywhere."""
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
        return store.get("written").decode()
    everybody, problem = list(mine), "rank 0 did not get the events of all ranks"
    try:
        for other in range(1, size):
            everybody += json.loads(store.get(f"events/{other}"))
            store.delete_key(f"events/{other}")
        problem = _try_to_write(path, everybody)
    finally:
        store.set("written", problem)  # the others wait for it, whatever happened here
    return problem


def _try_to_write(path: str | os.PathLike[str], events: Sequence[dict[str, Any]]) -> str:
    """Write the file; returns what is in the way, nothing where it is written."""
    try:
        write(path, events)
    except OSError as error:
        return _obstacle(path) or error.strerror or str(error)
    return ""


def _obstacle(path: str | os.PathLike[str]) -> str | None:
    """Return why a file cannot be written to `path`, as far as can be seen without doing it."""
    target = Path(path).absolute()
    if target.is_dir():
        return "this is a folder"
    if not target.parent.is_dir():
        return f"there is no folder {str(target.parent)!r}"
    place = target if target.exists() else target.parent
    if not os.access(place, os.W_OK):
        return f"no permission to write to {str(place)!r}"
    return None


def _not_written(path: str | os.PathLike[str], problem: str) -> UnisonoError:
    hint = (
        "a file in a folder that exists and can be written: UNISONO_TRACE=trace.json, trace(path)"
    )
    return UnisonoError.because(f"a trace to {os.fspath(path)!r}", problem, None, hint)


def save_alone(path: str | os.PathLike[str], events: list[Event]) -> None:
    """Write `events` of this rank only, to `path` or, beside other ranks, `path.rank3`. Local."""
    ranks = {event.rank for event in events}
    alone = not dist.is_initialized() and ranks <= {0} and not standing()
    name = str(path) if alone else f"{path}.rank{min(ranks, default=0)}"
    problem = _try_to_write(name, [asdict(e) for e in events])
    if problem:
        raise _not_written(name, problem)


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
