"""One clock for all ranks of a record: seconds since the run began, by rank 0's watch."""

from __future__ import annotations

import time

import torch.distributed as dist
from torch.distributed import PrefixStore

from unisono.comm.groups import store_of_world
from unisono.comm.health.trace import clock_offset_ns
from unisono.environment import detect


def zero_of_run(started_ns: int) -> int:
    """Return the reading of this process's `perf_counter_ns` at the moment the run began.

    Ranks of one host share that counter. Over several hosts it is collective over the world: rank 0
    is asked for its time, as clocks of hosts differ by more than a collective takes.

    Args:
        started_ns: the moment, as `time.time_ns` of the host that began the run.
    """
    own = time.perf_counter_ns() - (time.time_ns() - started_ns)
    whole, environment = store_of_world(), detect()
    if whole is None or environment.nodes == 1:
        return own
    rank, size = environment.rank, environment.size
    if dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
    store = PrefixStore("unisono/record", whole)
    store = PrefixStore(str((store.add("round", 1) - 1) // size), store)
    if rank == 0:
        store.set("zero", str(own))
    offset = clock_offset_ns(store, rank, size)
    return own if rank == 0 else int(store.get("zero")) - offset
