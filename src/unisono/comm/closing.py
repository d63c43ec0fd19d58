"""Ending a world so that no rank sees another's connections break."""

from __future__ import annotations

import contextlib
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore

from unisono.comm import groups, tracing, watchdog

LEAVE_S = 5.0
"""Longest time to wait for the other ranks."""


def close_world(*, timeout_s: float = LEAVE_S) -> None:
    """End the world of this process: all ranks come together, rank 0 leaves last.

    Collective over the world. Rank 0 keeps the store, so it waits until the others have let go
    (at most `timeout_s`, so that a dead rank delays nobody for long). Saves the trace that
    `UNISONO_TRACE` asked for. Without an initialised torch.distributed only that is done.
    """
    if not dist.is_initialized():
        tracing.save_whole_run()
        return
    rank, size = dist.get_rank(), dist.get_world_size()
    if size > 1:
        store = PrefixStore("unisono/close", watchdog.default_store())
        wait = timedelta(seconds=timeout_s)
        with contextlib.suppress(RuntimeError):  # a rank or the store is gone: just leave
            store.set(f"here/{rank}", "")
            store.wait([f"here/{r}" for r in range(size)], wait)
            tracing.save_whole_run()
        watchdog.stop()
        with contextlib.suppress(RuntimeError):
            if rank != 0:
                store.set(f"gone/{rank}", "")
            else:
                store.wait([f"gone/{r}" for r in range(1, size)], wait)
    else:
        tracing.save_whole_run()
    dist.destroy_process_group()
    groups.forget_ended()
