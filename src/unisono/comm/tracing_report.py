"""Bringing the events of all ranks together, on one clock, into one file."""

from __future__ import annotations

import json
import os
import statistics
import time
from dataclasses import asdict

import torch.distributed as dist
from torch.distributed import PrefixStore

from unisono.comm.tracing import Event
from unisono.comm.watchdog import default_store
from unisono.trace_file import write

_PINGS = 16


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
