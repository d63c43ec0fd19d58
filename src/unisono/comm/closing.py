"""Ending a world so that no rank sees another's connections break, and nobody waits in vain."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from unisono.comm import groups, tracing, watchdog
from unisono.comm.failures import post_failure, posted_failure
from unisono.comm.outlook import announce_return
from unisono.errors import UnisonoError

LEAVE_S = 5.0
"""Longest time to wait for the other ranks of a world that is well."""
BROKEN_S = 1.0
"""Longest time that the keeper of the store stays in a broken one, so that others learn why."""
_LAST_NAP_S = 0.02
_PEERS_S = 0.1


def close_world(*, timeout_s: float = LEAVE_S) -> None:
    """End the world of this process: all ranks come together, rank 0 leaves last.

    Collective over the world. Rank 0 keeps the store, so it waits until the others have let go (at
    most `timeout_s`). After a failure, or where a process of the world has ended, ranks leave
    without waiting. Saves the trace that `UNISONO_TRACE` asked for; rank 0 warns if it cannot be
    written. Without an initialised torch.distributed only that is done.
    """
    if not dist.is_initialized():
        with tracing.warned_of():
            tracing.save_whole_run()
        return
    rank, size = dist.get_rank(), dist.get_world_size()
    untraced: UnisonoError | None = None
    if size > 1:
        say_returned()
        store = _store()
        is_well = False
        with contextlib.suppress(RuntimeError):  # a rank or the store is gone: just leave
            store.set(f"here/{rank}", "")
            is_well = _await(store, "here", range(size), timeout_s)
            if is_well:
                untraced = _save_trace()
        watchdog.stop()
        _say_goodbye(timeout_s if is_well else min(timeout_s, BROKEN_S))
    else:
        untraced = _save_trace()
    dist.destroy_process_group()
    groups.forget_ended()
    if untraced is not None and rank == 0:
        warnings.warn(str(untraced), RuntimeWarning, stacklevel=2)


def _save_trace() -> UnisonoError | None:
    """Save the trace of the whole run; returns why it could not be written, the same everywhere."""
    try:
        tracing.save_whole_run()
    except UnisonoError as error:
        return error
    return None


def say_returned() -> None:
    """Tell the other ranks that this one's function has returned. Local, safe to repeat.

    Called by whoever runs the rank's function. Ranks that wait for this one in a collective, now or
    later, then raise `CollectiveMismatch` at once.
    """
    announce_return(groups.accounts())


def abandon_world(error: BaseException) -> None:
    """Leave a world because of `error`: tell the other ranks, and wait for none of them.

    Only the keeper of the store stays for a moment, so that the others can learn of it. Not
    collective. The process group stays as it is: the process is about to end.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        with contextlib.suppress(RuntimeError):
            post_failure(error)
        _say_goodbye(BROKEN_S)


def _store() -> Store:
    return PrefixStore("unisono/close", watchdog.default_store())


def _say_goodbye(timeout_s: float) -> None:
    """Tell that this rank has let go; rank 0 waits until all have."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with contextlib.suppress(RuntimeError):
        if rank != 0:
            _store().set(f"gone/{rank}", "")
        else:
            _await(_store(), "gone", range(1, size), timeout_s, even_broken=True)


def _await(
    store: Store, what: str, ranks: Sequence[int], timeout_s: float, *, even_broken: bool = False
) -> bool:
    """Wait until all `ranks` have left a key; return whether they have.

    Ranks whose process has ended are not waited for, and nobody is in a broken world, unless
    `even_broken`.
    """
    give_up = time.monotonic() + timeout_s
    look, nap_s = time.monotonic() + _PEERS_S / 2, 1e-3
    missing = list(ranks)
    dead: list[int] = []
    while True:
        missing = [rank for rank in missing if not store.check([f"{what}/{rank}"])]
        if not missing:
            return not dead
        now = time.monotonic()
        if now > give_up or (not even_broken and _is_broken()):
            return False
        if now > look:
            look = now + _PEERS_S
            dead += [rank for rank in missing if watchdog.is_process_dead(rank)]
            missing = [rank for rank in missing if rank not in dead]
            if dead and not even_broken:
                return False
        time.sleep(nap_s)
        nap_s = min(nap_s * 1.5, _LAST_NAP_S)


def _is_broken() -> bool:
    dog = watchdog.current()
    has_failed = dog is not None and dog.has_failed
    return has_failed or groups.is_broken() or posted_failure() is not None
