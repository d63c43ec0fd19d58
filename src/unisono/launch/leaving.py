"""The end of a rank whose function returned: as an interpreter ends, but quicker."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from typing import NoReturn

from unisono.launch.messages import Lingering, send_message

THREADS_S = 2.0
"""Time that threads of the function, no daemons, have to end; a process would wait for ever."""


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
