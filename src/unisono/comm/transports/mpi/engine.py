"""The kernels of a group whose ranks talk over an MPI communicator."""

from __future__ import annotations

import socket
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from unisono.comm.engine import Ticket
from unisono.comm.reductions import check_op
from unisono.comm.transports.jobs import JobQueue
from unisono.comm.transports.mpi import moves, sums
from unisono.comm.transports.mpi.leaving import Departure, depart
from unisono.comm.transports.mpi.line import Line
from unisono.comm.transports.mpi.messages import Messages, Transfer
from unisono.comm.transports.mpi.news import Notice
from unisono.comm.transports.queued import QueuedEngine, SourceTicket
from unisono.errors import RankFailed, RankTimeout, UnisonoError


class MessageTicket:
    """Messages under way, as the verbs see them."""

    def __init__(self, engine: MpiEngine, transfers: Sequence[Transfer]) -> None:
        self._engine = engine
        self._transfers = transfers

    def wait(self, timeout_s: float) -> None:
        """See `Ticket`."""
        self._engine.finish_messages(self._transfers, timeout_s)

    def done(self) -> bool:
        """See `Ticket`."""
        self._engine.messages.progress()
        return all(transfer.is_done for transfer in self._transfers)

    @property
    def source(self) -> int:
        """See `SourceTicket`."""
        peer = self._transfers[0].peer
        return -1 if peer is None else peer


class MpiEngine(QueuedEngine):
    """Kernels of ranks that share an MPI communicator.

    Args:
        line: the way to the other ranks.
        ranks: world ranks of the group, for messages.
        jobs: order of calls, shared with the process group.
        max_tag: largest tag MPI allows.
        is_world: whether this is the group of all ranks.
    """

    backend = "mpi4py"

    def __init__(
        self, line: Line, ranks: Sequence[int], jobs: JobQueue, *, max_tag: int, is_world: bool
    ) -> None:
        super().__init__(line.rank, ranks, jobs)
        self.line = line
        self.messages = Messages(line, max_tag)
        self._is_world = is_world
        self._is_broken = False
        jobs.chore = self.messages.progress
        jobs.has_chores = self._has_chores

    # -- collectives ----------------------------------------------------------------------------

    def all_reduce_(self, x: Tensor, op: str, *, async_op: bool, timeout_s: float) -> Ticket | None:
        """See `Engine`."""
        check_op(op, x.dtype)
        return self._sum("all_reduce", sums.all_reduce, (x, op), async_op, timeout_s)

    def reduce_(
        self, x: Tensor, dst: int, op: str, *, async_op: bool, timeout_s: float
    ) -> Ticket | None:
        """See `Engine`; leaves `x` as it is on the other ranks."""
        check_op(op, x.dtype)
        return self._sum("reduce", sums.all_reduce, (x, op, dst), async_op, timeout_s)

    def reduce_scatter(
        self,
        out: Tensor,
        ins: Sequence[Tensor],
        op: str,
        *,
        alike: int = 0,  # noqa: ARG002
        async_op: bool,
        timeout_s: float,
    ) -> Ticket | None:
        """See `Engine`."""
        check_op(op, out.dtype)
        return self._sum("reduce_scatter", sums.reduce_scatter, (out, ins, op), async_op, timeout_s)

    def _sum(
        self,
        name: str,
        kernel: Callable[..., str],
        arguments: tuple[Any, ...],
        async_op: bool,
        timeout_s: float,
    ) -> Ticket | None:
        def run() -> None:
            self.last_algorithm = kernel(self.line, *arguments)

        return self.call(name, run, async_op, timeout_s)

    def broadcast_(self, x: Tensor, src: int, *, async_op: bool, timeout_s: float) -> Ticket | None:
        """See `Engine`."""
        return self._move("broadcast", moves.broadcast, (x, src), async_op, timeout_s)

    def all_gather(
        self,
        outs: Sequence[Tensor],
        x: Tensor,
        *,
        alike: int = 0,  # noqa: ARG002
        async_op: bool,
        timeout_s: float,
    ) -> Ticket | None:
        """See `Engine`."""
        return self._move("all_gather", moves.all_gather, (outs, x), async_op, timeout_s)

    def all_to_all(
        self, outs: Sequence[Tensor], ins: Sequence[Tensor], *, async_op: bool, timeout_s: float
    ) -> Ticket | None:
        """See `Engine`."""
        return self._move("all_to_all", moves.all_to_all, (outs, ins), async_op, timeout_s)

    def gather(
        self,
        outs: Sequence[Tensor] | None,
        x: Tensor,
        dst: int,
        *,
        async_op: bool,
        timeout_s: float,
    ) -> Ticket | None:
        """See `Engine`."""
        return self._move("gather", moves.gather, (outs, x, dst), async_op, timeout_s)

    def scatter(
        self,
        out: Tensor,
        ins: Sequence[Tensor] | None,
        src: int,
        *,
        async_op: bool,
        timeout_s: float,
    ) -> Ticket | None:
        """See `Engine`."""
        return self._move("scatter", moves.scatter, (out, ins, src), async_op, timeout_s)

    def barrier(self, *, async_op: bool, timeout_s: float) -> Ticket | None:
        """See `Engine`."""
        return self._move("barrier", moves.barrier, (), async_op, timeout_s)

    def _move(
        self,
        name: str,
        kernel: Callable[..., None],
        arguments: tuple[Any, ...],
        async_op: bool,
        timeout_s: float,
    ) -> Ticket | None:
        self.last_algorithm = "native"
        return self.call(name, partial(kernel, self.line, *arguments), async_op, timeout_s)

    def all_gather_ints(self, values: Sequence[int], *, timeout_s: float) -> list[tuple[int, ...]]:
        """See `Engine`."""
        rows: list[tuple[int, ...]] = []

        def kernel() -> None:
            rows.extend(moves.all_gather_ints(self.line, values))

        self.call("all_gather_ints", kernel, False, timeout_s)
        return rows

    def call(
        self, name: str, kernel: Callable[[], Any], async_op: bool, timeout_s: float
    ) -> Ticket | None:
        """See `QueuedEngine`."""
        self.line.threads.check(name)
        return super().call(name, partial(self._guarded, kernel), async_op, timeout_s)

    def _guarded(self, kernel: Callable[[], Any]) -> None:
        with self.line.kernel():
            kernel()

    # -- messages -------------------------------------------------------------------------------

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        recvs: Sequence[tuple[int, Tensor]],
        tag: int,
        *,
        async_op: bool,
        timeout_s: float,
    ) -> Ticket | None:
        """See `Engine`. Messages do not queue behind collectives."""
        self.check_usable()
        self.line.threads.check("send or recv")
        transfers = [self.messages.post_recv(src, tag, x) for src, x in recvs]
        transfers += [self.messages.post_send(dst, tag, x) for dst, x in sends]
        if not async_op:
            self.finish_messages(transfers, timeout_s)
            return None
        self._start_messages()
        return MessageTicket(self, transfers)

    def receive_any(self, x: Tensor, tag: int) -> SourceTicket:
        """See `QueuedEngine`."""
        self.check_usable()
        self.line.threads.check("recv")
        transfer = self.messages.post_recv(None, tag, x)
        self._start_messages()
        return MessageTicket(self, [transfer])

    def _start_messages(self) -> None:
        """See to it that messages posted so far move on while nobody waits for them."""
        self.messages.progress()
        if self.messages.under_way:
            self.jobs.wake()

    def finish_messages(self, transfers: Sequence[Transfer], timeout_s: float) -> None:
        """Wait for messages of this rank."""
        if all(transfer.is_done and transfer.error is None for transfer in transfers):
            return
        self.check_usable()
        self.line.watch.doing = "send or recv"
        try:
            self.messages.wait(transfers, timeout_s)
        except BaseException as error:
            self.fail(error)
            raise

    # -- life -----------------------------------------------------------------------------------

    @property
    def waited_ns(self) -> int:  # type: ignore[override]
        """See `Engine`."""
        return self.line.waited_ns

    def prepare(self, name: str, timeout_s: float) -> None:
        """See `QueuedEngine`."""
        line = self.line
        line.timeout_s = timeout_s
        line.behind = self.jobs.in_background
        line.watch.doing = name
        line.watch.number += 1

    def tell_failure(self, error: BaseException) -> None:
        """See `QueuedEngine`."""
        self._is_broken = True
        if isinstance(error, RankFailed) or self.line.mpi.Is_finalized():
            return  # the others learn of it as this rank did, or not any more
        if isinstance(error, UnisonoError):  # says enough by itself
            lines = traceback.format_exception_only(error)
        else:
            lines = traceback.format_exception(error)
        me = self.ranks[self.rank]
        self.line.watch.news.tell(
            Notice(
                "timeout" if isinstance(error, RankTimeout) else "failed",
                me,
                self.culprit(error),
                self.line.watch.number,
                socket.gethostname(),
                "".join(lines).strip(),
            )
        )

    def _has_chores(self) -> bool:
        return self.messages.under_way > 0 and self.cause is None

    def cancel(self, why: str) -> None:
        """See `QueuedEngine`."""
        self.line.watch.cancelled = why

    def release(self) -> None:
        """See `QueuedEngine`: tell the others, and free the communicator when all have left."""
        if self.line.mpi.Is_finalized():
            return
        self.messages.release()
        news = self.line.watch.news
        news.tell(Notice("left", self.ranks[self.rank]))
        depart(
            Departure(
                self.line.mpi,
                news,
                is_broken=self._is_broken,
                is_world=self._is_world,
            )
        )
