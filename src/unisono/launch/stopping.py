"""The ways in which a run is ended: a stop that all ranks agree on, Ctrl-C, TERM, a deadline.

In a rank, a signal only sets a flag. `should_stop` asks all ranks whether one of them has it; the
function then saves and calls `requeue`. Ctrl-C in the launcher sets it, too; a function that does
not ask gets a `KeyboardInterrupt`, as it would in a process on its own.

In the launcher, the first Ctrl-C makes the supervisor ask the ranks to save and end; the second
kills them. TERM and HUP end them as an error does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from unisono.errors import PlatformError, RankTimeout, Requeue, explain, grouped_stacks
from unisono.expect import expect_int
from unisono.launch.context import here

__all__ = ["job_dir", "requeue", "restart_count", "should_stop", "simulate_preemption"]

EXIT_CODE = 124
"""Exit code of a process that is ended at its deadline, as that of `timeout`."""
GIVE_UP_S = 5.0
"""Time that the main thread has to end after its deadline."""
_ORDERS = (signal.SIGTERM, signal.SIGHUP)
_ALARM = signal.SIGALRM
_requested = threading.Event()
_interrupted = threading.Event()
_listener: Callable[[], None] | None = None
"""Called in the launcher at the first Ctrl-C, which then raises nothing."""
_is_working = False
"""Whether the function runs: only then may an interrupt be raised."""
_calls = 0
_agreed = False
_agreement: Callable[[], bool] | None = None
"""Answers `should_stop`, where that is not a collective of the world."""


def note_request() -> None:
    """Record that this rank is to stop."""
    _requested.set()


def note_interrupt(seconds: float) -> None:
    """Record that the launcher was interrupted: end within `seconds`. From any thread.

    A function that has called `should_stop` before will call it again: it is interrupted only if it
    has not done so in half of the time.
    """
    _interrupted.set()
    _requested.set()
    if _calls == 0:
        _interrupt_main()
    else:
        timer = threading.Timer(seconds / 2, lambda: None if _agreed else _interrupt_main())
        timer.daemon = True
        timer.start()


def was_interrupted() -> bool:
    """Whether the launcher was interrupted."""
    return _interrupted.is_set()


@contextmanager
def interruptible() -> Iterator[None]:
    """Allow interrupts of the main thread inside the block, where the function of the rank runs."""
    global _is_working
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # from a shell's background job
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # from a worker of Ray
    _is_working = True
    try:
        if _interrupted.is_set():  # while this rank was starting
            raise KeyboardInterrupt
        yield
    finally:
        _is_working = False


def _interrupt_main() -> None:
    main = threading.main_thread().ident
    if _is_working and main is not None:
        signal.pthread_kill(main, signal.SIGINT)  # which also ends a sleep, unlike a flag


def forget_request() -> None:
    """Reset all flags, for another attempt in the same process."""
    global _calls, _agreed
    _requested.clear()
    _calls, _agreed = 0, False


def is_wanted() -> bool:
    """Whether this rank was asked to stop, whatever the others know."""
    return _requested.is_set()


def agree_by(ask: Callable[[], bool] | None) -> None:
    """Make `should_stop` call `ask` instead of asking the world; None restores that."""
    global _agreement
    _agreement = ask


def should_stop(*, every: int = 1) -> bool:
    """Return whether any rank was asked to stop; the same answer on all ranks.

    Collective over the world at every `every`-th call, so all ranks must call it equally often;
    between two of them it repeats the last answer.

    Args:
        every: how many calls share one question to the other ranks.
    """
    global _calls, _agreed
    expect_int("every", every, 1, error=PlatformError)
    _calls += 1
    if not _agreed and _calls % every == 0:
        if _agreement is not None:
            _agreed = _agreement()
            return _agreed
        import torch

        from unisono.launch.in_process import world

        comm = world().with_device("cpu")
        flag = torch.tensor([int(_requested.is_set())])
        _agreed = bool(comm.all_reduce(flag, op="max").item())
    return _agreed


def requeue() -> None:
    """Ask for another start, after a save; raises `Requeue`. Collective."""
    from unisono.launch.in_process import world

    world().with_device("cpu").barrier()
    raise Requeue(
        explain(
            "unisono.requeue() asks unisono.run to start this function again",
            hint="call it inside unisono.run; elsewhere the function is not started again",
        )
    )


def restart_count() -> int:
    """Return the number of this attempt; the first is 0."""
    text = os.environ.get("UNISONO_RESTART", "0")
    return int(text) if text.isdigit() else 0


def job_dir() -> Path | None:
    """Return the directory of this run; None in a process that is no rank of one."""
    text = os.environ.get("UNISONO_JOB_DIR")
    return Path(text) if text else None


def simulate_preemption(*, after_s: float = 0.0) -> None:
    """Deliver a stop signal to this rank, as a scheduler would, `after_s` seconds from now."""

    def deliver() -> None:
        me = here()
        if me is None or me.report_fd is None:
            note_request()  # no launcher: this process has no handler for the signal
        else:
            os.kill(os.getpid(), signal.SIGTERM)

    if after_s > 0:
        timer = threading.Timer(after_s, deliver)
        timer.daemon = True
        timer.start()
    else:
        deliver()


class _Terminated(BaseException):
    def __init__(self, number: int) -> None:
        self.number = number


@contextmanager
def signals_of_launcher() -> Iterator[None]:
    """Turn TERM and HUP into an exception inside the block, and raise the signal again after it.

    The first Ctrl-C calls the listener of `first_told_to`, or is a `KeyboardInterrupt` without one;
    the second always is. Later ones are ignored: all ranks are being killed. Signals that the
    program handles are left alone; outside the main thread all are.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handled = [number for number in _ORDERS if signal.getsignal(number) is signal.SIG_DFL]
    takes_interrupts = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    raised = 0
    was_told = False

    def raise_it(number: int, _frame: FrameType | None) -> None:
        raise _Terminated(number)

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        nonlocal raised, was_told
        if _listener is not None and not was_told and not raised:
            was_told = True
            _listener()
        elif raised < (1 if was_told else 2):
            raised += 1
            raise KeyboardInterrupt

    for number in handled:
        signal.signal(number, raise_it)
    if takes_interrupts:
        signal.signal(signal.SIGINT, interrupt)
    received: int | None = None
    try:
        yield
    except _Terminated as order:
        received = order.number
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)
        if takes_interrupts:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    if received is not None:
        os.kill(os.getpid(), received)


@contextmanager
def first_told_to(listener: Callable[[], None]) -> Iterator[None]:
    """Call `listener` at the first Ctrl-C inside the block, in its signal handler.

    Only in the main thread: others do not get signals.
    """
    global _listener
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before


def announce(seconds: float) -> None:
    """Print what the first Ctrl-C does."""
    print(
        f"\nunisono: interrupted; the ranks have {seconds:g} s to save and end "
        "(Ctrl-C again kills them)",
        file=sys.stderr,
        flush=True,
    )


@contextmanager
def deadline(timeout_s: float | None, *, rank: int, size: int) -> Iterator[None]:
    """Raise `RankTimeout` in the block if it has not ended after `timeout_s`; None is never.

    For a function in a world of another launcher, without a supervisor. A thread waits for the
    deadline, collects the stacks of all ranks that answer, and interrupts the main thread; if that
    does not react, the process ends.

    Outside the main thread nothing can be interrupted, and the process ends with code 124.
    """
    if timeout_s is None:
        yield
        return
    main = threading.main_thread()
    is_main = threading.current_thread() is main
    is_over = threading.Event()
    errors: list[RankTimeout] = []

    def raise_it(_number: int, _frame: FrameType | None) -> None:
        if errors and not is_over.is_set():
            raise errors.pop()

    def wait() -> None:
        if is_over.wait(timeout_s):
            return
        error = _timeout(timeout_s, rank, size)
        errors.append(error)
        if is_main and not is_over.is_set() and main.ident is not None:
            signal.pthread_kill(main.ident, _ALARM)
        # Collecting stacks has taken a while: the function may have ended meanwhile.
        if not is_over.wait(GIVE_UP_S if is_main else 0):
            _end_process(error)

    before = signal.signal(_ALARM, raise_it) if is_main else None
    watcher = threading.Thread(target=wait, name="unisono-deadline", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        is_over.set()
        watcher.join()
        if is_main:
            signal.signal(_ALARM, before)


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
        f"{grouped_stacks(stacks, [rank])}\n"
        "HINT: a longer timeout_s (--timeout-s) if this is only slow",
        stacks=stacks,
        rank=rank,
    )


def _end_process(error: RankTimeout) -> None:
    """End this process, whose main thread does not react; tell the other ranks why."""
    from unisono.comm.health.failures import post_failure

    print(f"unisono: {error}", file=sys.stderr, flush=True)
    with contextlib.suppress(Exception):
        post_failure(error)
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.COMM_WORLD.Abort(EXIT_CODE)
    os._exit(EXIT_CODE)
