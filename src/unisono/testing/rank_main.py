"""The life of one rank: join a group, run functions, leave the group, wait for the next.

Runs in a process forked from the warm one. Nothing here decides that a test failed; it only tells
the pool what happened, and ends when the pool's connection closes.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import os
import pickle
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TextIO

import cloudpickle
import numpy
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from unisono.comm import seal
from unisono.errors import an
from unisono.testing.assertions import show_comparisons
from unisono.testing.leaks import HOST_KINDS, KINDS, Holdings
from unisono.testing.messages import (
    Call,
    Closed,
    Command,
    Open,
    Opened,
    Reply,
    Returned,
)
from unisono.testing.rank_files import STACK_SIGNAL, output_file, stack_file
from unisono.testing.rank_state import RankState
from unisono.testing.tracebacks import describe_exception

_WATCHED = tuple(kind for kind in KINDS if kind not in HOST_KINDS)


def rank_main(conn: Connection, rank: int, directory: str) -> None:
    """Answer the pool until its connection closes."""
    # What a test forks or starts must neither speak for this rank nor keep its line open.
    os.set_inheritable(conn.fileno(), False)
    os.register_at_fork(after_in_child=conn.close)
    stacks = _redirect(rank, Path(directory))
    process = _RankProcess(rank, stacks)
    while True:
        try:
            command: Command = pickle.loads(conn.recv_bytes())
        except (EOFError, OSError):
            return
        try:
            reply = process.answer(command)
        except BaseException as error:
            reply = describe_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
        conn.send_bytes(pickle.dumps(reply))


def _redirect(rank: int, directory: Path) -> int:
    """Send all output of this process to its file; return the descriptor for its stacks."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    output = os.open(output_file(directory, rank), flags, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    sys.stdout, sys.stderr = _writer(1), _writer(2)
    return os.open(stack_file(directory, rank), flags, 0o600)


def _writer(fd: int) -> TextIO:
    return open(fd, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)


class _RankProcess:
    """The state of one rank between commands."""

    def __init__(self, rank: int, stacks: int) -> None:
        self.rank = rank
        self.stacks = stacks
        self.filters = b""
        self.kept: tuple[bytes, Any] | None = None
        torch.set_num_threads(1)

    def answer(self, command: Command) -> Reply:
        if isinstance(command, Open):
            return self.open(command)
        if isinstance(command, Call):
            return self.call(command)
        return self.close()

    def open(self, command: Open) -> Opened:
        faulthandler.enable(self.stacks)
        faulthandler.register(STACK_SIGNAL, file=self.stacks, all_threads=True)
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
            store=FileStore(command.store, command.world),
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
        return Returned(payload=_pickled(value if command.keep else None, self.rank))

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


def _pickled(value: Any, rank: int) -> bytes:
    try:
        return cloudpickle.dumps(value)
    except Exception as error:
        raise TypeError(
            f"rank {rank} returned {an(type(value).__name__)} that cannot travel to the test "
            f"process: {error}"
        ) from None


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
