"""A deadline for a function in a world that somebody else started: nobody watches from outside.

A thread waits for it. When it passes, the stacks of all ranks that answer are collected, and the
main thread is interrupted; if it does not come back, the process ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from unisono.errors import RankTimeout
from unisono.launch.stacks import grouped

EXIT_CODE = 124
"""Of a process that had to be ended, as `timeout` and the command line have it."""
GIVE_UP_S = 5.0
"""Time that the main thread has to end after its deadline."""
_SIGNAL = signal.SIGALRM


@contextlib.contextmanager
def deadline(timeout_s: float | None, *, rank: int, size: int) -> Iterator[None]:
    """Raise `RankTimeout` in the block if it has not ended after `timeout_s`; None is never.

    Outside the main thread nothing can be interrupted, and the process ends with code 124.
    """
    if timeout_s is None:
        yield
        return
    main = threading.main_thread()
    is_main = threading.current_thread() is main
    is_over = threading.Event()
    found: list[RankTimeout] = []

    def raise_it(_number: int, _frame: FrameType | None) -> None:
        if found:
            raise found.pop()

    def wait() -> None:
        if is_over.wait(timeout_s):
            return
        error = _timeout(timeout_s, rank, size)
        found.append(error)
        if is_main and not is_over.is_set() and main.ident is not None:
            signal.pthread_kill(main.ident, _SIGNAL)
            if is_over.wait(GIVE_UP_S):
                return
        _end_process(error)

    before = signal.signal(_SIGNAL, raise_it) if is_main else None
    watcher = threading.Thread(target=wait, name="unisono-deadline", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        is_over.set()
        watcher.join()
        if is_main:
            signal.signal(_SIGNAL, before)


def _timeout(timeout_s: float, rank: int, size: int) -> RankTimeout:
    """Return the error, with the stacks of all ranks that answer."""
    from unisono.comm.health import watchdog

    stacks = {rank: watchdog.describe_self()["stacks"]}
    with contextlib.suppress(RuntimeError):
        dog = watchdog.ensure()
        if dog is not None:
            stacks |= {other: answer["stacks"] for other, answer in dog.ask_stacks().items()}
    return RankTimeout(
        f"rank {rank} of {size} not done within timeout_s={timeout_s:g}\n"
        f"{grouped(stacks, rank)}\n"
        "HINT: a longer timeout_s if this is only slow",
        stacks=stacks,
        rank=rank,
    )


def _end_process(error: RankTimeout) -> None:
    """End this process, whose main thread does not answer; the others learn why."""
    from unisono.comm.health.failures import post_failure

    print(f"unisono: {error}", file=sys.stderr, flush=True)
    with contextlib.suppress(Exception):
        post_failure(error)
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.COMM_WORLD.Abort(EXIT_CODE)
    os._exit(EXIT_CODE)
