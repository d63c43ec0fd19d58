"""What the ranks of a group tell each other outside of collectives: failures, and that they leave.

Short JSON messages with a tag of their own. They are read only by ranks that wait for long, and by
those that leave.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from unisono.comm.transports.mpi.library import Threads

if TYPE_CHECKING:
    from mpi4py import MPI

_TEXT_LIMIT = 6000
"""Longer texts, in bytes, lose their middle: a message of this size is never held back by MPI."""


@dataclass(frozen=True)
class Notice:
    """What one rank tells all others.

    Attributes:
        kind: `failed`, `timeout` or `left`.
        teller: world rank of the sender.
        culprit: world rank to blame.
        number: number of the collective in which it happened.
        host: host of the sender.
        text: for people.
    """

    kind: str
    teller: int
    culprit: int = -1
    number: int = 0
    host: str = ""
    text: str = ""


class News:
    """Notices of one group.

    Args:
        mpi: the module `mpi4py.MPI`.
        comm: communicator of the group.
        ranks: world ranks of the group.
        threads: what threads may do.
        tag: tag of the messages.
    """

    def __init__(
        self, mpi: Any, comm: MPI.Intracomm, ranks: Sequence[int], threads: Threads, tag: int
    ) -> None:
        self._mpi = mpi
        self._comm = comm
        self._rank = comm.rank
        self._ranks = tuple(ranks)
        self._threads = threads
        self._tag = tag
        self._sent: list[Any] = []
        self.failures: list[Notice] = []
        """Failures heard of so far."""
        self.gone: set[int] = set()
        """World ranks that have left the group."""

    def tell(self, notice: Notice) -> None:
        """Send a notice to all other ranks; does not wait, and a broken MPI breaks nothing more."""
        cut = notice.text.encode(errors="replace")
        if len(cut) > _TEXT_LIMIT:
            cut = cut[: _TEXT_LIMIT // 2] + b"\n[...]\n" + cut[-_TEXT_LIMIT // 2 :]
        fields = {**asdict(notice), "text": cut.decode(errors="replace")}
        data = json.dumps(fields, ensure_ascii=False).encode()
        for peer in range(len(self._ranks)):
            if peer == self._rank:
                continue
            try:
                with self._threads.lock:
                    request = self._comm.Isend([data, self._mpi.BYTE], peer, self._tag)
            except self._mpi.Exception:
                continue
            self._sent.append((request, data))

    def listen(self) -> None:
        """Take in the notices that have come."""
        while True:
            with self._threads.lock:
                status = self._mpi.Status()
                message = self._comm.Improbe(self._mpi.ANY_SOURCE, self._tag, status)
                if message is None:
                    return
                room = bytearray(status.Get_count(self._mpi.BYTE))
                message.Recv([room, self._mpi.BYTE])
            notice = Notice(**json.loads(room))
            if notice.kind == "left":
                self.gone.add(notice.teller)
            else:
                self.failures.append(notice)

    def has_everybody_left(self) -> bool:
        """Whether all other ranks have said that they leave, and know that this one does."""
        self.listen()
        with self._threads.lock:
            delivered = all(request.Test() for request, _ in self._sent)
        return delivered and len(self.gone) == len(self._ranks) - 1

    def free(self) -> None:
        """Give the communicator back; nobody may use it any more."""
        with self._threads.lock:
            self._comm.Free()
