"""The life of a rank of the pool: join a group, run functions, leave the group, wait for the next.

Runs in a process forked from the warm server. Nothing here decides that a test failed; it only
tells the pool what happened, and ends when the pool's pipe closes. Settings that a test may change
are taken before it and put back after it; what cannot be put back is a matter of `leaks.py`.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import os
import random
import signal
import socket
import sys
import traceback
import unittest
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import numpy
import torch
import torch.distributed as dist

from unisono.comm import seal
from unisono.errors import an
from unisono.launch.pool.payload import dump_value
from unisono.launch.pool.protocol import (
    Hello,
    Returned,
    drop_descriptor,
    receive_message,
    send_message,
)
from unisono.launch.pool.stacks import chain_of
from unisono.testing.calls import STACK_SIGNAL, Call, Closed, Command, Open, Opened, Raised, Reply
from unisono.testing.leaks import HOST_KINDS, KINDS, Holdings

_WATCHED = tuple(kind for kind in KINDS if kind not in HOST_KINDS)


def answer_pool(own: dict[str, Any], report_fd: int, control_fd: int, result_fd: int) -> None:
    """Answer the pool until its pipe closes."""

    def part_from_rank() -> None:
        drop_descriptor(report_fd)
        drop_descriptor(control_fd)

    # What a test forks must neither speak for this rank nor listen to its orders.
    os.register_at_fork(after_in_child=part_from_rank)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
    stacks = os.open(own["stacks"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    process = _RankProcess(own["rank"], stacks, result_fd)
    process.answer_stack_signal()
    send_message(report_fd, Hello(host=socket.gethostname()))
    while (command := receive_message(control_fd)) is not None:
        try:
            reply = process.answer(command)
        except BaseException as error:
            reply = describe_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
        send_message(report_fd, reply)


class _RankProcess:
    """The state of one rank between commands."""

    def __init__(self, rank: int, stacks: int, result: int) -> None:
        self.rank = rank
        self.stacks = stacks
        self.result = result
        self.filters = b""
        self.kept: tuple[bytes, Any] | None = None
        torch.set_num_threads(1)

    def answer_stack_signal(self) -> None:
        faulthandler.enable(self.stacks)
        faulthandler.register(STACK_SIGNAL, file=self.stacks, all_threads=True)

    def answer(self, command: Command) -> Reply:
        if isinstance(command, Open):
            return self.open(command)
        if isinstance(command, Call):
            return self.call(command)
        return self.close()

    def open(self, command: Open) -> Opened:
        self.answer_stack_signal()  # a test may have taken the signal
        os.environ.clear()
        os.environ.update(command.environ)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
        os.chdir(command.cwd)
        sys.path[:] = command.path
        self.filters = command.filters
        self.state = RankState.now()
        self.holdings = Holdings.now(_WATCHED)
        seal.give_secret(command.secret)
        dist.init_process_group(
            command.backend,
            store=dist.FileStore(command.store, command.world),
            rank=self.rank,
            world_size=command.world,
            timeout=datetime.timedelta(seconds=command.group_timeout_s),
        )
        return Opened()

    def call(self, command: Call) -> Reply:
        random.seed(command.seed)
        numpy.random.seed(command.seed)
        torch.manual_seed(command.seed)
        with contextlib.ExitStack() as stack:
            stack.enter_context(_warnings_filtered(self.filters))
            stack.enter_context(show_comparisons(command.verbosity))
            function, args, kwargs = self.unpacked(command)
            for name in command.remake:
                kwargs[name] = stack.enter_context(_FIXTURES[name]())
            value = function(*args, **kwargs)
        try:
            packed = dump_value(value if command.keep else None, self.result)
        except TypeError as error:
            raise TypeError(
                f"rank {self.rank} returned {an(type(value).__name__)} that cannot travel to the "
                f"test process: {error}"
            ) from None
        return Returned(value=packed.data, wall_s=0.0)

    def unpacked(self, command: Call) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """Return what to call; between examples of one test, function and fixtures are kept."""
        if not command.drawn:
            return cloudpickle.loads(command.payload)
        if self.kept is None or self.kept[0] != command.payload:
            self.kept = command.payload, cloudpickle.loads(command.payload)
        function, args, kwargs = self.kept[1]
        return function, args, {**kwargs, **cloudpickle.loads(command.drawn)}

    def close(self) -> Closed:
        self.kept = None
        _leave_group()
        leaks = self.holdings.new()
        changed = self.state.restore()
        reusable = not leaks or set(leaks) == {"environment"}
        if changed:
            leaks["settings"] = changed
        gc.collect()
        return Closed(leaks=leaks, reusable=reusable)


def _leave_group() -> None:
    close_world = getattr(sys.modules.get("unisono.comm"), "close_world", None)
    if close_world is not None:
        close_world()
    if dist.is_initialized():
        dist.destroy_process_group()
    forget_ended = getattr(sys.modules.get("unisono.comm.groups"), "forget_ended", None)
    if forget_ended is not None:
        forget_ended()


@contextlib.contextmanager
def _warnings_filtered(filters: bytes) -> Iterator[None]:
    """Hold the warning filters of the test process, for the test alone."""
    with warnings.catch_warnings():
        warnings.filters[:] = cloudpickle.loads(filters)  # pyright: ignore[reportIndexIssue]
        # On a rank, assume() is called outside hypothesis itself, but not by mistake.
        warnings.filterwarnings("ignore", "Using `(assume|reject)` outside")
        yield


@contextlib.contextmanager
def _monkeypatch() -> Iterator[Any]:
    import pytest

    with pytest.MonkeyPatch.context() as patch:
        yield patch


_FIXTURES = {"monkeypatch": _monkeypatch}
"""How a rank makes the fixtures named in `REMADE_FIXTURES`."""


def describe_exception(error: BaseException) -> Raised:
    """Return what a rank tells the pool about `error`.

    Left out are our own frames, and those that set `__tracebackhide__`, pytest's word for "not
    interesting".
    """
    told = traceback.TracebackException.from_exception(error)
    for one, its_error in chain_of(told, error):
        frames = [frame for frame, _ in traceback.walk_tb(its_error.__traceback__)]
        if len(frames) == len(one.stack):
            one.stack[:] = [
                entry
                for entry, frame in zip(one.stack, frames, strict=True)
                if entry.filename != __file__ and not frame.f_locals.get("__tracebackhide__")
            ]
    summary = "".join(told.format_exception_only()).strip()
    outcome, reason = _outcome(error)
    return Raised(text="".join(told.format()), summary=summary, outcome=outcome, reason=reason)


def _outcome(error: BaseException) -> tuple[str, str]:
    """Tell a wish to skip from a failure."""
    outcomes: Any = sys.modules.get("_pytest.outcomes")
    if outcomes is not None and isinstance(error, (outcomes.Skipped, unittest.SkipTest)):
        return "skip", str(error)
    if outcomes is not None and isinstance(error, outcomes.XFailed):
        return "xfail", str(error)
    if type(error).__name__ == "UnsatisfiedAssumption":
        return "assume", ""
    return "error", ""


@contextlib.contextmanager
def show_comparisons(verbosity: int) -> Iterator[None]:
    """Make failing comparisons explain themselves, where there is pytest: the pool needs none."""
    try:
        from unisono.testing.internals import comparisons_explained
    except ImportError:
        yield
        return
    with comparisons_explained(verbosity):
        yield


_SIGNALS = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGCHLD", "SIGHUP")


def _set_signals(handlers: dict[str, Any]) -> None:
    for name, handler in handlers.items():
        signal.signal(getattr(signal, name), handler)


def _signals() -> dict[str, Any]:
    found = {name: signal.getsignal(getattr(signal, name)) for name in _SIGNALS}
    return {name: handler for name, handler in found.items() if handler is not None}


def _directory() -> str:
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return "(removed)"


def _set_environment(values: dict[str, str]) -> None:
    if dict(os.environ) != values:
        os.environ.clear()
        os.environ.update(values)


def _set_device(device: torch.device) -> None:
    # None, not "cpu": a device set by name slows every factory function down.
    torch.set_default_device(None if device.type == "cpu" else device)


def _set_path(values: list[str]) -> None:
    sys.path[:] = values


_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "default device": (torch.get_default_device, _set_device),
    "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "anomaly mode": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "threads of torch": (torch.get_num_threads, torch.set_num_threads),
    "deterministic mode": (
        torch.get_deterministic_debug_mode,
        torch.set_deterministic_debug_mode,
    ),
    "environment": (lambda: dict(os.environ), _set_environment),
    "working directory": (_directory, os.chdir),
    "sys.path": (lambda: list(sys.path), _set_path),
    "signal handlers": (_signals, _set_signals),
}

_RESTORED_SILENTLY = ("environment", "sys.path")
"""The environment is told by `leaks.py` in more detail; importing helpers may extend the path."""


@dataclass(frozen=True)
class RankState:
    """Settings of this process at one time."""

    values: dict[str, Any]

    @classmethod
    def now(cls) -> RankState:
        """Take the settings of this process."""
        return cls({name: get() for name, (get, _) in _SETTINGS.items()})

    def restore(self) -> list[str]:
        """Put the settings back; return a line for each that had changed."""
        changed: list[str] = []
        for name, (get, put) in _SETTINGS.items():
            before, after = self.values[name], get()
            if before == after:
                continue
            put(before)
            if name not in _RESTORED_SILENTLY:
                changed.append(f"{name}: {before} -> {after}")
        return changed
