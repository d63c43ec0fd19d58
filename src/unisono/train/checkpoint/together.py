"""What the ranks of a checkpoint do or refuse together: an error of one is that of all."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

from unisono.comm import Communicator
from unisono.errors import (
    SAVED_ALONE,
    CheckpointError,
    CollectiveMismatch,
    RankTimeout,
    compress_ranks,
)
from unisono.train.checkpoint.saving import advice, as_text

T = TypeVar("T")
_SHARED_S = 5.0
"""How long a network file system may take to show a file to other hosts."""


@contextmanager
def on_all_ranks() -> Iterator[None]:
    """Add to the error of a call that other ranks do not make that a save is collective."""
    try:
        yield
    except (CollectiveMismatch, RankTimeout) as error:
        error.add_note(SAVED_ALONE)
        raise


def together(comm: Communicator, call: str, action: Callable[[], T]) -> T:
    """Do something local on all ranks; if it fails on one, all raise. Collective."""
    result: T | None = None
    problem: BaseException | None = None
    try:
        result = action()
    except Exception as error:
        problem = error
    check_problems(call, comm.all_gather_object(as_text(problem)), problem)
    return cast("T", result)


def check_problems(call: str, problems: Sequence[str | None], cause: BaseException | None) -> None:
    """Raise if a rank has a problem; `cause` is that of this rank."""
    failed = [rank for rank, text in enumerate(problems) if text]
    if isinstance(cause, CheckpointError):
        raise cause
    if failed:
        text = f"{problems[failed[0]]}"
        raise CheckpointError.because(
            call, f"rank {failed[0]}: {text}", f"ranks: {compress_ranks(failed)}", advice(text)
        ) from cause


def check_equal(call: str, what: str, values: Sequence[Any], hint: str) -> None:
    """Raise if ranks do not agree on something."""
    for rank, value in enumerate(values):
        if value != values[0]:
            raise CheckpointError.because(
                call,
                f"rank 0 has {what} {_short(values[0])}, rank {rank} has {_short(value)}",
                hint=hint,
            )


def _short(value: Any) -> str:
    return ", ".join(value) if isinstance(value, dict) else repr(value)


def shared_directory(comm: Communicator, directory: Path) -> str:
    """Make a directory, check that all ranks see it, return a token of this run. Collective."""
    call = f"Checkpoint({str(directory)!r})"
    token = comm.broadcast_object(secrets.token_hex(6))
    sign = directory / f".seen-{token}"

    def make() -> None:
        if comm.rank == 0:
            directory.mkdir(parents=True, exist_ok=True)
            sign.touch()

    together(comm, call, make)
    end = time.monotonic() + _SHARED_S
    while not (is_visible := sign.exists()) and time.monotonic() < end:
        time.sleep(0.05)
    views = comm.all_gather_object((is_visible, str(directory), socket.gethostname()))
    if comm.rank == 0:
        sign.unlink(missing_ok=True)
    blind = [rank for rank, (sees, _, _) in enumerate(views) if not sees]
    if blind:
        _, place, host = views[blind[0]]
        raise CheckpointError.because(
            call,
            f"rank {blind[0]} on {host} looks into {place} and does not see what rank 0 on "
            f"{views[0][2]} writes into {views[0][1]}",
            f"ranks without the directory: {compress_ranks(blind)}",
            "a directory on a file system that all hosts share, the same on all ranks",
        )
    return token
