"""How the ranks of a group come to a communicator of their own, through the group's store.

Making a communicator blocks inside MPI without a deadline, so ranks meet in the store first, where
waiting has one. Only members take part.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from unisono.comm.processes import process_start
from unisono.comm.transports.mpi.library import Threads, load
from unisono.comm.transports.mpi.line import Line
from unisono.comm.transports.mpi.news import News
from unisono.comm.transports.mpi.watch import Marks, Member, Watch
from unisono.comm.transports.shm.rendezvous import Rendezvous, memory_id
from unisono.errors import MeshError

if TYPE_CHECKING:
    from mpi4py import MPI

_GROUP_TAGS = 32768
"""`Create_group` may use tags below this one with every MPI."""


def max_tag(mpi: Any) -> int:
    """Return the largest tag of a message."""
    return int(mpi.COMM_WORLD.Get_attr(mpi.TAG_UB))


def meet(
    store: dist.Store,
    rank: int,
    ranks: Sequence[int],
    timeout_s: float,
    base: MPI.Intracomm,
    *,
    is_own: bool,
) -> tuple[Line, str]:
    """Return the line of a new group, and a word of this group alone. Collective over the group.

    Args:
        store: store of the group.
        rank: own rank in the group.
        ranks: world ranks of the group, for messages.
        timeout_s: deadline for the others to come.
        base: a communicator with all ranks of the group in it.
        is_own: whether `base` was duplicated for this group, to be used as it is.
    """
    mpi = load()
    threads = Threads(mpi)
    threads.check("a new group")
    pid = os.getpid()
    me = Member(
        position=base.rank,
        job_size=base.size,
        memory=memory_id(),
        pid=pid,
        started=process_start(pid) or 0,
        hostname=socket.gethostname(),
    )
    rendezvous = Rendezvous(
        dist.PrefixStore("mpi", store), rank, ranks, timeout_s, backend="mpi4py"
    )
    nonce = secrets.token_hex(8) if rank == 0 else ""
    texts = rendezvous.share("member", json.dumps([asdict(me), nonce]))
    records = [json.loads(text) for text in texts]
    members = [Member(**record) for record, _ in records]
    nonce = records[0][1]
    positions = [member.position for member in members]
    _check_job(members, ranks)
    with threads.lock:
        if is_own and positions == list(range(base.size)):
            comm = base
        else:
            comm = _subset(base, positions, nonce)
        comm.Set_errhandler(mpi.ERRORS_RETURN)
    largest = max_tag(mpi)
    news = News(mpi, comm, ranks, threads, largest - 1)
    marks = Marks(nonce, rank, len(ranks))
    watch = Watch(ranks, rank, members, news, marks)
    line = Line(mpi, comm, threads, watch, largest)
    line.timeout_s = timeout_s
    with line.kernel():
        line.start(comm.Ibarrier)
        line.finish()
    rendezvous.clean()
    return line, nonce


def _subset(base: MPI.Intracomm, positions: Sequence[int], nonce: str) -> MPI.Intracomm:
    """Return a communicator of these ranks of `base`, in this order.

    Never by `Dup`, even for all of them: `base` may be busy with a collective in another thread,
    and `Dup` is one too, so ranks could do the two in different orders.
    """
    whole = base.Get_group()
    chosen = whole.Incl(list(positions))
    try:
        return base.Create_group(chosen, zlib.crc32(nonce.encode()) % _GROUP_TAGS)
    finally:
        chosen.Free()
        whole.Free()


def _check_job(members: Sequence[Member], ranks: Sequence[int]) -> None:
    """Refuse processes that MPI did not start together."""
    positions = [member.position for member in members]
    sizes = sorted({member.job_size for member in members})
    if len(sizes) == 1 and len(set(positions)) == len(positions):
        return
    raise MeshError.because(
        f"an MPI group of ranks {list(ranks)}",
        f"these processes are ranks {positions} of MPI jobs of {sizes} processes",
        "they are not of one MPI job",
        f"mpiexec -n {len(ranks)} python your_script.py",
    )
