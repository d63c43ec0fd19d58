"""A world that waits for its first use, and is joined by then at the latest.

A launcher of scripts leaves it to them how they begin: one that initialises torch.distributed by
itself brings its own group, and that is the world; in others whoever first asks joins it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from unisono.comm import watchdog

__all__ = ["has_world", "join_at_first_use", "store_of_world"]


@dataclass(frozen=True)
class _Waiting:
    """How the world of this process is joined, and the store at which its ranks meet."""

    join: Callable[[], None]
    store: dist.Store


_waiting: _Waiting | None = None


def _forget_after_fork() -> None:
    global _waiting
    _waiting = None  # a forked process is not the rank, and must not join in its place


os.register_at_fork(after_in_child=_forget_after_fork)


def join_at_first_use(join: Callable[[], None], store: dist.Store) -> None:
    """Have `join` start torch.distributed when somebody asks for the world and nobody else has."""
    global _waiting
    _waiting = _Waiting(join, store)


def has_world() -> bool:
    """Whether torch.distributed is initialised here.

    Local, except in a world that waits for its first use: this is it, collective over that world.
    """
    if not dist.is_initialized() and _waiting is not None:
        _waiting.join()
    return dist.is_initialized()


def store_of_world() -> dist.Store | None:
    """Return the store of this world, joined or not; None in a process on its own. Local."""
    if dist.is_initialized():
        return watchdog.default_store()
    return None if _waiting is None else _waiting.store
