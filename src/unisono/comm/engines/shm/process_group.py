"""The backend `shm` of torch.distributed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from unisono.comm.arguments import environment_timeout_s
from unisono.comm.engines.base import Engine, SelfEngine
from unisono.comm.engines.hosts import HostsEngine, Network
from unisono.comm.engines.queued import JobQueue
from unisono.comm.engines.shm.engine import ShmEngine
from unisono.comm.engines.shm.rendezvous import Meeting, Rendezvous, read_constants, setting
from unisono.comm.torch.process_group import NcclBeside, TransportProcessGroup
from unisono.errors import compress_ranks

_log = logging.getLogger("unisono")


class ShmProcessGroup(TransportProcessGroup):
    """Ranks of one host pass tensors through shared memory; ranks of several, also over gloo.

    Collective over the ranks of the group when it is made.

    Args:
        store: where the ranks meet.
        rank: own rank in the group.
        size: ranks of the group.
        timeout: deadline of making the group, and of each call.
        ranks: world ranks of the group; empty means 0 to `size` - 1.
        name: name of the group, for its thread.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: timedelta,
        ranks: Sequence[int] = (),
        name: str = "",
    ) -> None:
        deadline_s = environment_timeout_s()
        ranks = tuple(ranks) or tuple(range(size))
        engine, nonce = _make_engine(store, rank, ranks, timeout.total_seconds(), name or "group")
        beside = NcclBeside(dist.PrefixStore(f"shm/{nonce}", store), rank, size)
        super().__init__(engine, ranks, timeout, "shm", deadline_s, beside)


def _make_engine(
    store: dist.Store, rank: int, ranks: Sequence[int], timeout_s: float, name: str
) -> tuple[Engine, str]:
    """Let the ranks meet, and return the kernels that fit where they are, with a word of theirs."""
    if len(ranks) == 1:
        return SelfEngine(), "alone"
    rendezvous = Rendezvous(dist.PrefixStore("shm", store), rank, ranks, timeout_s)
    meeting = rendezvous.meet()
    local = _local_engine(meeting, rank, ranks, timeout_s)
    if len(meeting.hosts) == 1:
        engine: Engine = local
    else:
        network = Network(dist.PrefixStore(f"shm/{meeting.nonce}", store), rank, ranks, timeout_s)
        jobs = JobQueue(f"unisono-shm-{name}")
        engine = HostsEngine(local, meeting.hosts, rank, ranks, network, jobs)
        if rank == 0:
            _log.info(
                "shm group of ranks %s spans %d hosts: shared memory inside, gloo between",
                compress_ranks(ranks),
                len(meeting.hosts),
            )
        rendezvous.wait_for_all(meeting.nonce)
    rendezvous.clean()
    return engine, meeting.nonce


def _local_engine(meeting: Meeting, rank: int, ranks: Sequence[int], timeout_s: float) -> Engine:
    if meeting.segment is None:
        return SelfEngine()
    engine = ShmEngine(
        meeting.segment,
        *read_constants(meeting.segment),
        meeting.local.index(rank),
        [ranks[r] for r in meeting.local],
        meeting.processes,
        max_mb=setting("UNISONO_SHM_MAX_MB", None, least=0),
    )
    engine.barrier(async_op=False, timeout_s=timeout_s)
    return engine
