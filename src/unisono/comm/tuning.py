"""Measuring where the low-latency algorithms stop to pay on this machine and network."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from unisono.comm.algorithms import forcing

if TYPE_CHECKING:
    from unisono.comm.communicator import Communicator

_SIZES = (1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20)
_ROUNDS = 7
_RIVALS = {"all_gather": ("all_to_all", "broadcasts"), "all_reduce": ("all_to_all", "native")}


def measure_limits(comm: Communicator) -> dict[str, int]:
    """Return per verb the largest size, in bytes of the whole, at which the first rival wins."""
    limits: dict[str, int] = {}
    if comm.size == 1:
        return limits
    for verb, (small, large) in _RIVALS.items():
        limits[verb] = 0
        for nbytes in _SIZES:
            run = _case(comm, verb, nbytes)
            quick = _slowest_rank(comm, run, verb, small)
            slow = _slowest_rank(comm, run, verb, large)
            if quick < slow:
                limits[verb] = nbytes
    return limits


def _slowest_rank(
    comm: Communicator, run: Callable[[], object], verb: str, algorithm: str
) -> float:
    """Return the median over rounds of the slowest rank's time; equal on all ranks."""
    times: list[float] = []
    with forcing(verb, algorithm):
        for _ in range(_ROUNDS):
            comm.barrier()
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
    mine = torch.tensor([statistics.median(times)], dtype=torch.float64, device=comm.device)
    return float(comm.all_reduce(mine, "max"))


def _case(comm: Communicator, verb: str, nbytes: int) -> Callable[[], object]:
    if verb == "all_gather":
        share = max(nbytes // comm.size, 1)
        x = torch.ones(share, dtype=torch.uint8, device=comm.device)
        return lambda: comm.all_gather(x, sizes=[share] * comm.size)
    x = torch.ones(nbytes, dtype=torch.uint8, device=comm.device)
    return lambda: comm.all_reduce(x, "max")
