"""Measuring this machine with ranks: links between them, and how they slow each other down."""

from __future__ import annotations

import datetime
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

import unisono
from unisono.comm import Communicator
from unisono.cores import usable_cores
from unisono.plan.calibration import TYPICAL, Calibration, fit_link
from unisono.plan.profile import one_thread, step_of
from unisono.plan.subject import Subject

__all__ = ["calibrate", "group_over", "hidden_share", "overlapping", "sums_over"]

RANKS = (2, 4)
SIZES = (4 << 10, 256 << 10, 2 << 20, 8 << 20)
_ROUNDS = 9
_COPY = 32 << 20


def calibrate(
    subjects: Sequence[Callable[[], Subject]],
    *,
    ranks: Sequence[int] = RANKS,
    rounds: int = _ROUNDS,
) -> Calibration:
    """Measure links over 2 and 4 ranks, and each model on 1, 2 and 4 ranks at once.

    Starts ranks on this host, one thread each. Best on a machine that does nothing else.

    Args:
        subjects: functions that make the models, on the ranks.
        ranks: numbers of ranks.
        rounds: of each measurement; medians count.
    """
    sums: dict[str, dict[int, list[tuple[int, float]]]] = {"shm": {}, "gloo": {}}
    slowdown: dict[str, dict[int, float]] = {}
    alone: dict[str, float] = {}
    overlap = 0.0
    for count in (1, *ranks):
        found = unisono.run(_measure, list(subjects), rounds, ranks=count)[0]
        for name, seconds in found["steps"].items():
            alone.setdefault(name, seconds)
            slowdown.setdefault(name, {})[count] = max(1.0, seconds / alone[name])
        for backend, times in found["sums"].items():
            sums[backend][count] = times
        if count == ranks[0]:
            overlap = found["overlap"]
    links = {name: fit_link(TYPICAL.links[name], sums[name]) for name in sums}
    links["gloo"] = replace(links["gloo"], overlap=overlap)
    today = datetime.datetime.now(tz=datetime.UTC).date()
    return Calibration(
        cores=usable_cores(),
        links=links,
        memcpy_bytes_per_s=_copy_rate(),
        slowdown=slowdown,
        machine=f"{platform.node()}, {platform.machine()}, torch {torch.__version__}, {today}",
    )


def group_over(backend: str) -> Communicator:
    """Return all ranks over a backend, on this host. Collective over the world."""
    before = os.environ.get("GLOO_SOCKET_IFNAME")
    os.environ["GLOO_SOCKET_IFNAME"] = before or "lo"
    try:
        return Communicator.of(dist.new_group(backend=backend))
    finally:
        if before is None:
            del os.environ["GLOO_SOCKET_IFNAME"]


def sums_over(comm: Communicator) -> dict[int, Callable[[], object]]:
    """Return in-place sums by their bytes, made as gradient buckets are added. Collective."""
    cases: dict[int, Callable[[], object]] = {}
    for nbytes in SIZES:
        x = comm.shared_buffer((nbytes // 4,), torch.float32)
        cases[nbytes] = partial(comm.all_reduce_, x.fill_(1.0), "mean")
    return cases


def overlapping(comm: Communicator) -> list[Callable[[], object]]:
    """Return a sum, some computing, and both at once. Collective over `comm` when called."""
    x, a = torch.ones(1 << 20), torch.randn(256, 256)

    def send() -> None:
        comm.all_reduce_(x, "mean")

    def compute() -> None:
        for _ in range(12):
            torch.mm(a, a)

    def both() -> None:
        pending = comm.start.all_reduce_(x, "mean")
        compute()
        pending.wait()

    return [send, compute, both]


def hidden_share(sending_s: float, computing_s: float, together_s: float) -> float:
    """Return which share of the shorter of two disappears behind the other.

    >>> hidden_share(2.0, 4.0, 4.0), hidden_share(2.0, 4.0, 6.0), hidden_share(2.0, 4.0, 5.0)
    (1.0, 0.0, 0.5)
    """
    hidden = (sending_s + computing_s - together_s) / min(sending_s, computing_s)
    return min(1.0, max(0.0, hidden))


def _measure(makers: Sequence[Callable[[], Subject]], rounds: int) -> dict:
    """Measure everything that this number of ranks can tell. Collective over the world."""
    torch.set_num_threads(1)
    comm = unisono.world()
    steps: dict[str, float] = {}
    for make in makers:
        torch.manual_seed(comm.rank)
        subject = make()
        step = step_of(subject)
        count = max(1, min(40, round(0.15 / max(sum(step()), 1e-6))))
        count = int(comm.all_reduce(torch.tensor([count]), "min"))
        times = [_timed(comm, step, repeats=count) for _ in range(rounds)]
        # Ranks that share a core take turns: their mean is what the core does.
        mean = comm.all_reduce(torch.tensor([statistics.median(times)]), "mean")
        steps[subject.name] = float(mean)
    if comm.size == 1:
        return {"steps": steps, "sums": {}, "overlap": 0.0}
    groups = {backend: group_over(backend) for backend in ("shm", "gloo")}
    sums = {
        backend: [(n, _median(group, add, rounds)) for n, add in sums_over(group).items()]
        for backend, group in groups.items()
    }
    parts = [_median(groups["gloo"], work, rounds) for work in overlapping(groups["gloo"])]
    return {"steps": steps, "sums": sums, "overlap": hidden_share(*parts)}


def _median(comm: Communicator, work: Callable[[], object], rounds: int) -> float:
    """Return the median time of the slowest rank."""
    work()
    times = torch.tensor([_timed(comm, work, repeats=3) for _ in range(rounds)])
    return float(comm.all_reduce(times, "max").median())


def _timed(comm: Communicator, work: Callable[[], object], repeats: int) -> float:
    comm.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    return (time.perf_counter() - start) / repeats


def _copy_rate() -> float:
    """Return how fast one core copies memory."""
    x, y = torch.ones(_COPY // 4), torch.empty(_COPY // 4)
    times: list[float] = []
    with one_thread():
        for _ in range(5):
            start = time.perf_counter()
            y.copy_(x)
            times.append(time.perf_counter() - start)
    return _COPY / statistics.median(times)
