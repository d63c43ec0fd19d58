"""The end of a rank: work that must not be lost is finished, within a bound; then it leaves.

A rank whose function returned ends as an interpreter ends, but quicker.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from typing import NoReturn, Protocol

from unisono.launch.messages import Finishing, Lingering, send_message

THREADS_S = 2.0
"""Time that threads of the function, no daemons, have to end; a process would wait for ever."""

FINISH_S = 60.0
"""Time that unfinished work of a rank gets at its end, or `Platform.grace_s` if that is longer."""


class Work(Protocol):
    """Something under way in the background of this process that must not be lost."""

    def finish(self, limit_s: float) -> str | None:
        """Wait for it; return what went wrong, if something did."""
        ...


_unfinished: list[Work] = []


def add_work(work: Work) -> None:
    """Let this process, should it be a rank, finish `work` before it ends in whatever way."""
    _unfinished.append(work)


def remove_work(work: Work) -> None:
    """Forget work that is finished."""
    with contextlib.suppress(ValueError):
        _unfinished.remove(work)


def finish_work(report_fd: int, grace_s: float) -> None:
    """Finish what is under way; the launcher is told, so that it waits for that long."""
    if not _unfinished:
        return
    limit_s = max(FINISH_S, grace_s)
    with contextlib.suppress(OSError):
        send_message(report_fd, Finishing(seconds=limit_s))
    end = time.monotonic() + limit_s
    while _unfinished:
        trouble = _unfinished.pop(0).finish(max(0.0, end - time.monotonic()))
        if trouble is not None:
            with contextlib.suppress(Exception):
                print(f"unisono: {trouble}", file=sys.stderr, flush=True)


def leave(report_fd: int) -> NoReturn:
    """End as an interpreter does (threads, exit functions, streams), but without unloading torch.

    That takes longer than a warm start, and the system takes the memory back anyway.
    """
    if lingering := _lingering_threads(THREADS_S):
        with contextlib.suppress(OSError):
            send_message(report_fd, Lingering(threads=tuple(t.name for t in lingering)))
    else:
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    _finalize_mpi()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(0)


def _lingering_threads(limit_s: float) -> list[threading.Thread]:
    """Wait for the function's threads; return those that still run, and keep the process."""
    end = time.monotonic() + limit_s
    mine = threading.current_thread()
    threads = [t for t in threading.enumerate() if t is not mine and not t.daemon]
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return [thread for thread in threads if thread.is_alive()]


def _finalize_mpi() -> None:
    """Leave MPI if the function has entered it: mpi4py does so in an exit that is not ours."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()
