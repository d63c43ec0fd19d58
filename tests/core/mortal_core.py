"""Ranks of a shm engine that die or stop at a chosen step of a kernel, without torch.distributed.

Run as a script by `test_faults.py`. Each line of input is a request `{"kernel", "signal", "steps",
"victim"}`; for each of the steps a world of three ranks is forked, all at once, in which the victim
raises the signal at that step. Each line of output is a list of `{"step", "hit", "reports"}`.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from unisono.comm.engines import core
from unisono.comm.engines.shm import ShmEngine
from unisono.processes import process_start

SIZE = 3
SLOT_BYTES = 4096
N = 1500
"""Elements (float32) that need more than one slot."""
DEADLINE_S = {"SIGKILL": 20.0, "SIGSTOP": 0.6}

Kernel = Callable[[ShmEngine, dict[str, Any]], object]


def rows(engine: ShmEngine, n: int = N) -> list[torch.Tensor]:
    return [torch.full((n,), float(engine.rank)) for _ in range(engine.size)]


def placed_rows(engine: ShmEngine, how: dict[str, Any]) -> list[torch.Tensor]:
    buffer = engine.shared_buffer((engine.size, N), torch.float32, timeout_s=how["timeout_s"])
    return list(buffer.unbind())


def message(engine: ShmEngine, how: dict[str, Any], n: int) -> object:
    after, before = (engine.rank + 1) % engine.size, (engine.rank - 1) % engine.size
    return engine.exchange([(after, torch.ones(n))], [(before, torch.empty(n))], 3, **how)


KERNELS: dict[str, Kernel] = {
    "barrier": lambda e, how: e.barrier(**how),
    "small all_reduce": lambda e, how: e.all_reduce_(torch.ones(10), "sum", **how),
    # More chunks than the four halves of its slots.
    "large all_reduce": lambda e, how: e.all_reduce_(torch.ones(2 * N), "sum", **how),
    "placed all_reduce": lambda e, how: e.all_reduce_(placed_rows(e, how)[0], "sum", **how),
    "reduce": lambda e, how: e.reduce_(torch.ones(N), 0, "sum", **how),
    "broadcast": lambda e, how: e.broadcast_(torch.ones(2 * N), 1, **how),
    "all_gather": lambda e, how: e.all_gather(rows(e), torch.ones(N), **how),
    "placed all_gather": lambda e, how: e.all_gather(rows(e), placed_rows(e, how)[0], **how),
    "gather": lambda e, how: e.gather(rows(e) if e.rank == 0 else None, torch.ones(N), 0, **how),
    "scatter": lambda e, how: e.scatter(torch.empty(N), rows(e) if e.rank == 1 else None, 1, **how),
    "reduce_scatter": lambda e, how: e.reduce_scatter(torch.empty(N), rows(e), "sum", **how),
    "all_to_all": lambda e, how: e.all_to_all(rows(e), rows(e), **how),
    "placed all_to_all": lambda e, how: e.all_to_all(rows(e), placed_rows(e, how), **how),
    "ints": lambda e, how: e.all_gather_ints([1, 2], timeout_s=how["timeout_s"]),
    "shared_buffer": placed_rows,
    "small message": lambda e, how: message(e, how, 10),
    "large message": lambda e, how: message(e, how, 120_000),
}


def run_rank(request: dict[str, Any], step: int, engine: ShmEngine) -> dict[str, Any]:
    how = {"async_op": False, "timeout_s": DEADLINE_S[request["signal"]]}
    engine.barrier(async_op=False, timeout_s=60.0)
    began = time.monotonic()
    if engine.rank == request["victim"]:
        engine._core.fault_after(step, getattr(signal, request["signal"]))
    try:
        KERNELS[request["kernel"]](engine, how)
        if engine.rank == request["victim"]:
            engine._core.fault_after(0, 0)
        engine.barrier(**how)
    except Exception as error:
        return {
            "error": type(error).__name__,
            "text": str(error),
            "rank": getattr(error, "rank", None),
            "missing": list(getattr(error, "missing", ())),
            "seconds": time.monotonic() - began,
        }
    return {"error": None}


def fork_world(request: dict[str, Any], step: int) -> list[tuple[int, int, int]]:
    """Start the ranks of one world; return process, pipe to it and pipe from it of each."""
    shared = core.SharedSegment.create(core.load().layout(SIZE, SLOT_BYTES)[0])
    shared.seal()
    ranks = []
    for rank in range(SIZE):
        (orders, order), (report, reports) = os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.close(order)
                os.close(report)
                pids = json.loads(os.read(orders, 4096))
                processes = [(pid, process_start(pid) or 0) for pid in pids]
                engine = ShmEngine(shared, SLOT_BYTES, rank, range(SIZE), processes)
                os.write(reports, json.dumps(run_rank(request, step, engine)).encode())
                engine.close()
                code = 0
            finally:
                sys.stderr.flush()
                os._exit(code)
        os.close(orders)
        os.close(reports)
        ranks.append((pid, order, report))
    for _, order, _ in ranks:
        os.write(order, json.dumps([pid for pid, _, _ in ranks]).encode())
        os.close(order)
    return ranks


def speaks(pid: int, report: int) -> bool:
    """Whether a rank has something to say, or has ended; one that was stopped has not."""
    while not select.select([report], [], [], 0.02)[0]:
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
            return False
    return True


def end_world(victim: int, ranks: list[tuple[int, int, int]]) -> list[dict[str, Any] | None]:
    """Collect what the survivors say, then what the victim says if it has not been hit."""
    found: list[dict[str, Any] | None] = [None] * SIZE
    for rank in sorted(range(SIZE), key=lambda rank: rank == victim):
        pid, _, report = ranks[rank]
        if rank != victim or speaks(pid, report):  # the others have ended by now
            text = os.read(report, 1 << 16)
            found[rank] = json.loads(text) if text else None
        os.close(report)
        if rank == victim and found[rank] is None:
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return found


def main() -> None:
    torch.set_num_threads(1)
    gc.freeze()  # else each fork may collect all that is loaded, which takes as long as a death
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        before = set(Path("/dev/shm").glob("unisono-*"))
        worlds = [(step, fork_world(request, step)) for step in request["steps"]]
        answer = []
        for step, ranks in worlds:
            reports = end_world(request["victim"], ranks)
            hit = reports[request["victim"]] is None
            answer.append({"step": step, "hit": hit, "reports": reports})
        left = set(Path("/dev/shm").glob("unisono-*")) - before
        print(json.dumps({"worlds": answer, "left": sorted(map(str, left))}), flush=True)


if __name__ == "__main__":
    main()
