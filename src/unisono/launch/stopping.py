"""Stopping in good order: a request to stop, agreed on by all ranks, and a new attempt after it.

A signal only sets a flag. `should_stop` asks all ranks whether one of them has it; the function
then saves and calls `requeue`. Ctrl-C in the launcher sets it, too; a function that does not ask
gets a `KeyboardInterrupt`, as it would in a process on its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

from unisono.errors import PlatformError, Requeue
from unisono.launch.here import here
from unisono.launch.messages import Preempt, send_message

__all__ = ["job_dir", "requeue", "restart_count", "should_stop", "simulate_preemption"]

_wanted = threading.Event()
_interrupted = threading.Event()
_is_working = False
"""Whether the function runs, which alone an interrupt is for."""
_calls = 0
_agreed = False


def note_request() -> None:
    """Remember that somebody wants this rank to stop."""
    _wanted.set()


def note_interrupt(seconds: float) -> None:
    """Somebody has interrupted the launcher: end within so many seconds. From any thread.

    A function that has asked `should_stop` before will ask again: it is interrupted only if it has
    not done so in half of the time.
    """
    _interrupted.set()
    _wanted.set()
    if _calls == 0:
        _interrupt_main()
    else:
        timer = threading.Timer(seconds / 2, lambda: None if _agreed else _interrupt_main())
        timer.daemon = True
        timer.start()


def was_interrupted() -> bool:
    """Whether somebody has interrupted the launcher."""
    return _interrupted.is_set()


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let interrupts reach the main thread inside the block: the function of the rank runs."""
    global _is_working
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # from a shell's background job
        signal.signal(signal.SIGINT, signal.default_int_handler)
    _is_working = True
    try:
        yield
    finally:
        _is_working = False


def _interrupt_main() -> None:
    main = threading.main_thread().ident
    if _is_working and main is not None:
        signal.pthread_kill(main, signal.SIGINT)  # which also ends a sleep, unlike a flag


def forget_request() -> None:
    """Begin anew, as another attempt does in the same process."""
    global _calls, _agreed
    _wanted.clear()
    _calls, _agreed = 0, False


def should_stop(*, every: int = 1) -> bool:
    """Tell whether any rank was asked to stop; the same answer on all ranks.

    Collective over the world at every `every`-th call, so all ranks must call it equally often;
    between two of them it repeats the last answer.

    Args:
        every: how many calls share one question to the other ranks.
    """
    global _calls, _agreed
    if every < 1:
        raise PlatformError.because(
            f"should_stop(every={every})", "less than one call", None, "should_stop(every=10)"
        )
    _calls += 1
    if not _agreed and _calls % every == 0:
        _agreed = _any_rank(_wanted.is_set())
    return _agreed


def _any_rank(mine: bool) -> bool:
    import torch

    from unisono.launch.existing import world

    comm = world().with_device("cpu")
    if comm.size == 1:
        return mine
    return bool(comm.all_reduce(torch.tensor([int(mine)]), op="max").item())


def requeue() -> None:
    """Say on all ranks: what is needed is saved, start me again. Collective; raises `Requeue`."""
    from unisono.launch.existing import world

    world().with_device("cpu").barrier()
    raise Requeue


def restart_count() -> int:
    """Return the number of this attempt; the first is 0."""
    text = os.environ.get("UNISONO_RESTART", "0")
    return int(text) if text.isdigit() else 0


def job_dir() -> Path | None:
    """Return the directory of this run; None in a process that is no rank of one."""
    text = os.environ.get("UNISONO_JOB_DIR")
    return Path(text) if text else None


def simulate_preemption(*, after_s: float = 0.0, rank: int | None = None) -> None:
    """Deliver a stop signal to this rank, or to `rank`, as a scheduler would.

    Args:
        after_s: how many seconds from now.
        rank: who gets it; None is this rank.
    """
    me = here()
    target = (me.rank if me is not None else 0) if rank is None else rank
    is_me = target == (me.rank if me is not None else 0)
    report_fd = me.report_fd if me is not None else None
    size = me.platform.world_size if me is not None else 1
    if not is_me and (report_fd is None or not 0 <= target < size):
        raise PlatformError.because(
            f"simulate_preemption(rank={rank})",
            f"this world has ranks 0 to {size - 1}",
            None,
            "call it in a function that unisono.run started",
        )

    def deliver() -> None:
        if not is_me and report_fd is not None:
            send_message(report_fd, Preempt(rank=target))
        elif report_fd is None:
            note_request()  # no launcher: nobody has prepared this process for the signal
        else:
            os.kill(os.getpid(), signal.SIGTERM)

    if after_s > 0:
        timer = threading.Timer(after_s, deliver)
        timer.daemon = True
        timer.start()
    else:
        deliver()
