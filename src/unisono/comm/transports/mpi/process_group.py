"""The backend `mpi4py` of torch.distributed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from unisono.comm.arguments import environment_timeout_s
from unisono.comm.engine import Engine
from unisono.comm.self_engine import SelfEngine
from unisono.comm.transports.c10d import TransportProcessGroup
from unisono.comm.transports.jobs import JobQueue
from unisono.comm.transports.mpi import leaving
from unisono.comm.transports.mpi.engine import MpiEngine
from unisono.comm.transports.mpi.inline import InlineJobs
from unisono.comm.transports.mpi.library import Threads, load
from unisono.comm.transports.mpi.meeting import max_tag, meet
from unisono.comm.transports.nccl import NcclBeside

if TYPE_CHECKING:
    from mpi4py import MPI


class MpiProcessGroup(TransportProcessGroup):
    """Ranks of one MPI job pass tensors over a communicator of their own.

    Collective over the ranks of the group when it is made.

    Args:
        store: where the ranks meet.
        rank: own rank in the group.
        size: ranks of the group.
        timeout: deadline of making the group, and of each call.
        ranks: world ranks of the group; empty means 0 to `size` - 1.
        name: name of the group, for its thread.
        own: a communicator of exactly these ranks, in this order, made for this group; None makes
            one from that of the world.
    """

    communicator: MPI.Intracomm | None
    """The communicator; None in a group of one rank."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: timedelta,
        ranks: Sequence[int] = (),
        name: str = "",
        *,
        own: MPI.Intracomm | None = None,
    ) -> None:
        mpi = load()
        deadline_s = environment_timeout_s()
        ranks = tuple(ranks) or tuple(range(size))
        kind = JobQueue if Threads(mpi).has_background else InlineJobs
        jobs = kind(f"unisono-mpi-{name or 'group'}")
        self.communicator = None
        engine: Engine = SelfEngine()
        nonce = "alone"
        if size > 1:
            leaving.sweep()
            base = _base(mpi) if own is None else own
            line, nonce = meet(
                store, rank, ranks, timeout.total_seconds(), base, is_own=own is not None
            )
            self.communicator = line.comm
            engine = MpiEngine(
                line,
                ranks,
                jobs,
                max_tag=max_tag(mpi),
                is_world=not dist.is_initialized(),
            )
            leaving.watch_over(engine)
        self._nccl = NcclBeside(dist.PrefixStore(f"mpi/{nonce}", store), rank, size)
        super().__init__(engine, ranks, timeout, "mpi4py", deadline_s)

    def inner_group(self, device: torch.device) -> Any:
        """Return the nccl group that serves CUDA tensors; made when first asked for."""
        if device.type != "cuda" or not dist.is_nccl_available():
            return super().inner_group(device)
        return self._nccl.group(self.options._timeout)

    def shutdown(self) -> None:
        """See `TransportProcessGroup`."""
        self._nccl.shutdown()
        super().shutdown()


def _base(mpi: Any) -> MPI.Intracomm:
    """Return the communicator from which groups are made: that of the world, or all of MPI."""
    world = dist.group.WORLD if dist.is_initialized() else None
    if isinstance(world, MpiProcessGroup) and world.communicator is not None:
        return world.communicator
    return mpi.COMM_WORLD


_offered: list[MPI.Intracomm] = []


def offer(comm: MPI.Intracomm | None) -> None:
    """Let the next default group use `comm`, which was made for it; None takes the offer back."""
    _offered[:] = [] if comm is None else [comm]


def create(options: Any, _: Any = None) -> MpiProcessGroup:
    """Make a group for torch.distributed from its backend options."""
    own = _offered.pop() if _offered and not dist.is_initialized() else None
    return MpiProcessGroup(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        options.global_ranks_in_group,
        str(options.group_id),
        own=own,
    )


def _abandon_after_fork() -> None:
    for engine in leaving.living():
        engine.abandon_after_fork()


os.register_at_fork(after_in_child=_abandon_after_fork)
