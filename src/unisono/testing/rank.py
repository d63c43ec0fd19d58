"""The life of a rank of the pool: join a group, run functions, leave the group, wait for the next.

Runs in a process forked from the warm server. The pool names a method of `Rank` and its arguments,
and gets one reply: what the method returns, or `Raised`. Nothing here decides that a test failed.
Settings that a test may change are taken before it and put back after it; what cannot be put back
is a matter of `leaks.py`.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import os
import pickle
import random
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy
import torch
import torch.distributed as dist

from unisono.comm import close_world, groups, seal
from unisono.comm.health import check
from unisono.errors import an
from unisono.launch.pool.payload import dump_value
from unisono.launch.pool.protocol import drop_descriptor, send_message, tell
from unisono.launch.pool.rank import forks_end_here
from unisono.launch.pool.stacks import chain_of
from unisono.testing.internals import comparisons_explained
from unisono.testing.leaks import HOST_KINDS, KINDS, Holdings
from unisono.testing.report import STACK_SIGNAL, Raised

_WATCHED = tuple(kind for kind in KINDS if kind not in HOST_KINDS)


def answer_pool(context: dict[str, Any], report_fd: int, control_fd: int, result_fd: int) -> None:
    """Answer the pool until its pipe closes."""
    # What a test forks must neither speak for this rank nor listen to its orders.
    for fd in (report_fd, control_fd):
        os.register_at_fork(after_in_child=lambda fd=fd: drop_descriptor(fd))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
    stacks = os.open(context["stacks"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    rank = Rank(context["rank"], stacks, result_fd)
    tell(report_fd, state="running")
    orders = os.fdopen(control_fd, "rb", closefd=False)
    while orders.read(8):  # the length of the order, which marks its own end
        method, arguments = pickle.load(orders)
        try:
            reply = getattr(rank, method)(**arguments)
        except BaseException as error:
            reply = describe_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
        send_message(report_fd, reply)


class Rank:
    """One rank between the orders of its pool; a world lives from `open` to `close`.

    Args:
        rank: its place in every world.
        stacks: file for its stacks.
        result: file for what it returns.
    """

    def __init__(self, rank: int, stacks: int, result: int) -> None:
        self._rank = rank
        self._stacks = stacks
        self._result = result
        self._kept: tuple[bytes, Any] | None = None
        self._answer_stack_signal()
        torch.set_num_threads(1)

    def _answer_stack_signal(self) -> None:
        faulthandler.enable(self._stacks)
        faulthandler.register(STACK_SIGNAL, file=self._stacks, all_threads=True)

    def open(
        self,
        *,
        world: int,
        store: str,
        secret: bytes,
        backend: str,
        group_timeout_s: float,
        environ: dict[str, str],
        cwd: str,
        path: list[str],
        filters: bytes,
    ) -> dict[str, str]:
        """Join a fresh default process group, and take over what the test process has.

        `store` is the path of the file through which the ranks find each other, and with `secret`
        they sign what they leave each other. The last four are those of the test process;
        `filters` are pickled by cloudpickle.
        """
        self._answer_stack_signal()  # a test may have taken the signal
        _set_environment(environ)
        check.start_from_environment()
        os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
        os.chdir(cwd)
        sys.path[:] = path
        self._filters = filters
        self._settings = {name: get() for name, (get, _) in _SETTINGS.items()}
        self._holdings = Holdings.now(_WATCHED)
        seal.give_secret(secret)
        dist.init_process_group(
            backend,
            store=dist.FileStore(store, world),
            rank=self._rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=group_timeout_s),
        )
        return {"state": "ready"}

    def call(
        self, *, call: bytes, drawn: bytes, remake: tuple[str, ...], verbosity: int
    ) -> dict[str, str]:
        """Run a function.

        Args:
            call: `(function, args, kwargs)`, pickled by cloudpickle.
            drawn: more of `kwargs`, pickled; with them, the call is kept for the next example.
            remake: names of keyword arguments that are to be a monkeypatch of this rank.
            verbosity: verbosity of pytest's comparison of unequal values.
        """
        random.seed(0)
        numpy.random.seed(0)
        torch.manual_seed(0)
        with contextlib.ExitStack() as stack:
            stack.enter_context(_warnings_filtered(self._filters))
            stack.enter_context(comparisons_explained(verbosity))
            if self._kept is None or self._kept[0] != call:
                self._kept = call, cloudpickle.loads(call)
            function, args, kwargs = self._kept[1]
            if drawn:
                kwargs = {**kwargs, **cloudpickle.loads(drawn)}
            else:
                self._kept = None
            for name in remake:
                import pytest  # only a test of it asks for fixtures

                kwargs[name] = stack.enter_context(pytest.MonkeyPatch.context())
            with forks_end_here():
                value = function(*args, **kwargs)
        try:
            dump_value(value, self._result)
        except TypeError as error:
            raise TypeError(
                f"rank {self._rank} returned {an(type(value).__name__)} that cannot travel to the "
                f"test process: {error}"
            ) from None
        return {"state": "returned"}

    def close(self) -> tuple[dict[str, list[str]], bool]:
        """Leave the group and put the process back as it was before `open`.

        Returns what the calls left behind, by kind, and whether all of it could be undone.
        """
        self._kept = None
        close_world()
        if dist.is_initialized():
            dist.destroy_process_group()
        groups.forget_ended()
        leaks = self._holdings.new()
        reusable = not leaks or set(leaks) == {"environment"}
        if changed := _restore(self._settings):
            leaks["settings"] = changed
        gc.collect()
        return leaks, reusable


@contextlib.contextmanager
def _warnings_filtered(filters: bytes) -> Iterator[None]:
    """Hold the warning filters of the test process, for the test alone."""
    with warnings.catch_warnings():
        warnings.filters[:] = cloudpickle.loads(filters)  # pyright: ignore[reportIndexIssue]
        # On a rank, assume() is called outside hypothesis itself, but not by mistake.
        warnings.filterwarnings("ignore", "Using `(assume|reject)` outside")
        yield


def describe_exception(error: BaseException) -> Raised:
    """Return what a rank tells the pool about `error`.

    Left out are our own frames, and those that set `__tracebackhide__`, pytest's word for "not
    interesting".
    """
    report = traceback.TracebackException.from_exception(error)
    for one, its_error in chain_of(report, error):
        frames = [frame for frame, _ in traceback.walk_tb(its_error.__traceback__)]
        if len(frames) == len(one.stack):
            one.stack[:] = [
                entry
                for entry, frame in zip(one.stack, frames, strict=True)
                if entry.filename != __file__ and not frame.f_locals.get("__tracebackhide__")
            ]
    summary = "".join(report.format_exception_only()).strip()
    kind = type(error)
    outcome = _OUTCOMES.get(f"{kind.__module__}.{kind.__name__}", "error")
    return Raised(
        text="".join(report.format()), summary=summary, outcome=outcome, reason=str(error)
    )


_OUTCOMES = {
    "builtins.Skipped": "skip",  # as pytest wants it to be called
    "unittest.case.SkipTest": "skip",
    "_pytest.outcomes.XFailed": "xfail",
    "hypothesis.errors.UnsatisfiedAssumption": "assume",
}
"""By name: neither pytest nor hypothesis need be there."""


_SIGNALS = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGCHLD", "SIGHUP")


def _set_signals(handlers: dict[str, Any]) -> None:
    for name, handler in handlers.items():
        signal.signal(getattr(signal, name), handler)


def _signals() -> dict[str, Any]:
    handlers = {name: signal.getsignal(getattr(signal, name)) for name in _SIGNALS}
    return {name: handler for name, handler in handlers.items() if handler is not None}


def _directory() -> str:
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return "(removed)"


def _set_environment(values: dict[str, str]) -> None:
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
"""`leaks.py` reports the environment in more detail; importing helpers may extend the path."""


def _restore(settings: dict[str, Any]) -> list[str]:
    """Put settings back; return a line for each that had changed."""
    changed: list[str] = []
    for name, (get, put) in _SETTINGS.items():
        before, after = settings[name], get()
        if before != after:
            put(before)
            if name not in _RESTORED_SILENTLY:
                changed.append(f"{name}: {before} -> {after}")
    return changed
