"""Ranks that may be killed: a process that forks a world for each request read from its input.

Run as a script by `test_death.py`. Each line of input is a request `{"case", "size", "reap"}`; each
line of output is the list of what the ranks reported (None for a rank that died). Nothing here is
imported by the ranks of the pool.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import unisono.comm
from unisono.comm.engines import rendezvous
from unisono.comm.health import watchdog

VICTIM = 1
CASES: dict[str, Callable[[int], dict]] = {}


def case(function: Callable[[int], dict]) -> Callable[[int], dict]:
    CASES[function.__name__] = function
    return function


def kill_myself(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def holdings() -> dict:
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    return {
        "fds": len(list(Path("/proc/self/fd").iterdir())),
        "threads": threading.active_count(),
        "segments": maps.count("memfd:unisono") + maps.count("/dev/shm/unisono"),
    }


def failure_of(call: Callable[[], object]) -> dict:
    """Run a call that must fail; tell how and how soon."""
    began = time.monotonic()
    try:
        call()
    except BaseException as error:
        return {
            "error": type(error).__name__,
            "text": str(error),
            "rank": getattr(error, "rank", None),
            "missing": list(getattr(error, "missing", ())),
            "seconds": time.monotonic() - began,
        }
    return {"error": None, "seconds": time.monotonic() - began}


def survive(rank: int, arm: Callable[[], object], call: Callable[[], object]) -> dict:
    """The victim arms its own death; all make the call; survivors report and clean up."""
    engine = dist.group.WORLD.unisono_engine
    dist.all_reduce(torch.ones(3))
    if rank == VICTIM:
        arm()
    report = failure_of(call)
    report["again"] = failure_of(lambda: dist.all_reduce(torch.ones(3)))
    del engine
    dist.destroy_process_group()
    report["left"] = holdings()
    return report


def die_after(steps: int) -> None:
    """Let the core kill this process when it has taken so many steps of a kernel."""
    dist.group.WORLD.unisono_engine._core.fault_after(steps, signal.SIGKILL)


BIG = 3_000_000


@case
def killed_while_copying_in(rank: int) -> dict:
    return survive(rank, lambda: die_after(2), lambda: dist.all_reduce(torch.ones(BIG)))


@case
def killed_between_meetings(rank: int) -> dict:
    return survive(rank, lambda: die_after(12), lambda: dist.all_reduce(torch.ones(BIG)))


@case
def killed_while_others_wait_in_the_background(rank: int) -> dict:
    def call() -> None:
        dist.all_reduce(torch.ones(5), async_op=True).wait()

    return survive(rank, kill_myself, call)


@case
def killed_while_idle(rank: int) -> dict:
    def arm() -> None:
        time.sleep(0.3)
        kill_myself()

    return survive(rank, arm, dist.barrier)


@case
def killed_before_its_message(rank: int) -> dict:
    return survive(rank, kill_myself, lambda: dist.recv(torch.empty(3), VICTIM))


@case
def killed_while_ddp_waits(rank: int) -> dict:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))

    def call() -> None:
        model(torch.ones(1, 4)).sum().backward()

    return survive(rank, kill_myself, call)


def killed_in_set_up(rank: int, size: int, store: dist.Store) -> dict:
    """Not in `CASES`: there is no world yet."""
    if rank == VICTIM:
        rendezvous.Rendezvous._map = kill_myself
    join = lambda: init(rank, size, store, 30)  # noqa: E731
    report = failure_of(join)
    report["left"] = holdings()
    return report


@case
def one_rank_raises_during_a_wait(rank: int) -> dict:
    """A bug in what a rank does while it waits, far from the caller's code."""

    def arm() -> None:
        def broken(*_: object) -> None:
            raise ZeroDivisionError("a bug during a wait")

        dist.group.WORLD.unisono_engine.watch.look = broken

    def call() -> None:
        if rank == 0:
            time.sleep(0.3)  # so that the others wait
        dist.all_reduce(torch.ones(BIG))

    return survive(rank, arm, call)


@case
def one_rank_leaves_without_a_word(rank: int) -> dict:
    def call() -> None:
        if rank == VICTIM:
            dist.destroy_process_group()
            time.sleep(1)
            os._exit(0)
        dist.barrier()

    return survive(rank, lambda: None, call)


@case
def killed_before_the_world_is_closed(rank: int) -> dict:
    dist.all_reduce(torch.ones(3))
    dist.barrier()
    if rank == VICTIM:
        kill_myself()
    report = failure_of(unisono.comm.close_world)
    report["left"] = holdings()
    return report


@case
def one_rank_is_slow(rank: int) -> dict:
    dist.barrier()
    cpu = time.process_time()
    if rank == VICTIM:
        time.sleep(1.5)
    report = failure_of(dist.barrier)
    report["cpu"] = time.process_time() - cpu
    dist.destroy_process_group()
    return report


@case
def one_rank_never_comes(rank: int) -> dict:
    engine = dist.group.WORLD.unisono_engine
    dist.barrier()
    if rank == VICTIM:
        time.sleep(2)
        return {"error": "slept"}
    return failure_of(lambda: engine.barrier(async_op=False, timeout_s=0.5))


@case
def one_rank_forks(rank: int) -> dict:
    dist.all_reduce(torch.ones(2), async_op=True).wait()  # there is a background thread now
    dist.barrier()
    child = {}
    if rank == VICTIM:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            speaks = watchdog.ensure() is not None
            tried = failure_of(lambda: dist.all_reduce(torch.ones(2)))
            later = failure_of(lambda: dist.all_reduce(torch.ones(2), async_op=True))
            told = {"child": [tried, later], "speaks for its parent": speaks}
            os.write(write, json.dumps(told).encode())
            dist.destroy_process_group()
            os._exit(0)
        os.waitpid(pid, 0)
        child = json.loads(os.read(read, 65536))
        os.close(read)
        os.close(write)
    x = torch.ones(2)
    dist.all_reduce(x)
    dist.barrier()
    dist.destroy_process_group()
    return {"error": None, "sum": x.tolist(), **child}


@case
def calls_differ(rank: int) -> dict:
    call = (lambda: dist.broadcast(torch.ones(4), 0)) if rank == VICTIM else dist.barrier
    return survive(rank, lambda: None, call)


@case
def sizes_differ(rank: int) -> dict:
    return survive(rank, lambda: None, lambda: dist.all_reduce(torch.ones(40_000 + rank)))


def init(rank: int, size: int, store: dist.Store, timeout_s: float) -> None:
    dist.init_process_group(
        "shm", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
    )


def run_rank(name: str, rank: int, size: int, path: str) -> dict:
    torch.set_num_threads(1)
    store = dist.FileStore(path, size)
    if name == "killed_in_set_up":
        return killed_in_set_up(rank, size, store)
    init(rank, size, store, 30)
    return CASES[name](rank)


def run_world(request: dict, folder: str) -> list[dict | None]:
    size, path = request["size"], tempfile.mktemp(dir=folder)
    pipes, pids = [], []
    for rank in range(size):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.close(read)
                report = run_rank(request["case"], rank, size, path)
                os.write(write, json.dumps(report).encode())
                code = 0
            finally:
                sys.stderr.flush()
                os._exit(code)
        os.close(write)
        pipes.append(read)
        pids.append(pid)
    if request["reap"]:  # else the dead stay zombies until the survivors have reported
        os.waitpid(pids[VICTIM], 0)
    reports = []
    for read in pipes:
        with os.fdopen(read, "rb") as pipe:
            text = pipe.read()
        reports.append(json.loads(text) if text else None)
    for rank, pid in enumerate(pids):
        if not (request["reap"] and rank == VICTIM):
            os.waitpid(pid, 0)
    return reports


def main() -> None:
    unisono.comm.transports.register()
    with tempfile.TemporaryDirectory() as folder:
        print("ready", flush=True)
        for line in sys.stdin:
            print(json.dumps(run_world(json.loads(line), folder)), flush=True)


if __name__ == "__main__":
    main()
