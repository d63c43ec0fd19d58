"""What all ranks do or refuse together: an error on one of them becomes the same error on all."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from unisono.comm import Communicator
from unisono.errors import CheckpointError, compress_ranks
from unisono.train.checkpoint.saving import advice, told

T = TypeVar("T")
_SHARED_S = 5.0
"""How long a network file system may take to show a file to other hosts."""


def together(comm: Communicator, asked: str, action: Callable[[], T]) -> T:
    """Do something local on all ranks; if it fails on one, all raise. Collective."""
    result: T | None = None
    problem: BaseException | None = None
    try:
        result = action()
    except Exception as error:
        problem = error
    check(asked, comm.all_gather_object(words(problem)), problem)
    return cast("T", result)


def words(problem: BaseException | None) -> str | None:
    """Return a problem as text that can travel."""
    if problem is None or isinstance(problem, CheckpointError):
        return None if problem is None else str(problem)
    return told(problem)


def check(asked: str, problems: Sequence[str | None], mine: BaseException | None) -> None:
    """Raise if a rank has a problem; `mine` is the own one."""
    failed = [rank for rank, text in enumerate(problems) if text]
    if isinstance(mine, CheckpointError):
        raise mine
    if failed:
        text = f"{problems[failed[0]]}"
        raise CheckpointError.because(
            asked, f"rank {failed[0]}: {text}", f"ranks: {compress_ranks(failed)}", advice(text)
        ) from mine


def check_equal(asked: str, what: str, values: Sequence[Any], hint: str) -> None:
    """Raise if ranks do not agree on something."""
    for rank, value in enumerate(values):
        if value != values[0]:
            raise CheckpointError.because(
                asked,
                f"rank 0 has {what} {_short(values[0])}, rank {rank} has {_short(value)}",
                None,
                hint,
            )


def _short(value: Any) -> str:
    return ", ".join(value) if isinstance(value, dict) else repr(value)


def shared_directory(comm: Communicator, directory: Path) -> str:
    """Make a directory, check that all ranks see it, return a word of this run. Collective."""
    asked = f"Checkpoint({str(directory)!r})"
    token = comm.broadcast_object(secrets.token_hex(6))
    sign = directory / f".seen-{token}"

    def make() -> None:
        if comm.rank == 0:
            directory.mkdir(parents=True, exist_ok=True)
            sign.touch()

    together(comm, asked, make)
    end = time.monotonic() + _SHARED_S
    while not (seen := sign.exists()) and time.monotonic() < end:
        time.sleep(0.05)
    everybody = comm.all_gather_object((seen, str(directory), socket.gethostname()))
    if comm.rank == 0:
        sign.unlink(missing_ok=True)
    blind = [rank for rank, (sees, _, _) in enumerate(everybody) if not sees]
    if blind:
        _, place, host = everybody[blind[0]]
        raise CheckpointError.because(
            asked,
            f"rank {blind[0]} on {host} looks into {place} and does not see what rank 0 on "
            f"{everybody[0][2]} writes into {everybody[0][1]}",
            f"ranks without the directory: {compress_ranks(blind)}",
            "a directory on a file system that all hosts share, the same on all ranks",
        )
    return token
