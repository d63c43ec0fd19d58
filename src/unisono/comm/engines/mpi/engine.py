"""The kernels of a group whose ranks talk over an MPI communicator, in its order of calls."""

from __future__ import annotations

import socket
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypedDict, Unpack

from torch import Tensor

from unisono.comm.engines.base import Ticket
from unisono.comm.engines.mpi import kernels
from unisono.comm.engines.mpi.channel import Channel, Messages, Transfer
from unisono.comm.engines.mpi.health import Notice
from unisono.comm.engines.queued import Job, JobQueue, QueuedEngine, SourceTicket
from unisono.comm.reductions import check_op
from unisono.errors import RankFailed, RankTimeout, UnisonoError

Kernel = Callable[..., str | None]
"""Does a whole collective over a channel; a reduction returns how it was done."""

_TEXT_LIMIT = 6000
"""Longer reports, in characters, lose their middle."""


class How(TypedDict):
    """How a kernel is run: whether it is only started, and until when."""

    async_op: bool
    timeout_s: float


class InlineJobs(JobQueue):
    """Runs everything in the caller's thread: the process may use MPI in one thread only.

    An asynchronous call is over when it returns.
    """

    def post(self, job: Job) -> None:
        """Run `job` now; its exception is kept for those who wait."""
        self.run(job.run)

    def wake(self) -> None:
        """Start no thread: messages move on while somebody waits."""


class MessageTicket:
    """Messages under way, as the verbs see them."""

    def __init__(self, engine: MpiEngine, transfers: Sequence[Transfer]) -> None:
        self._engine = engine
        self._transfers = transfers

    def wait(self, timeout_s: float) -> None:
        """Return when all of them have ended, or raise."""
        self._engine.finish_messages(self._transfers, timeout_s)

    def done(self) -> bool:
        """Whether `wait` would return (or raise) at once."""
        self._engine.messages.progress()
        return all(transfer.is_done for transfer in self._transfers)

    @property
    def source(self) -> int:
        """Rank of the group that sent the message, once it is done."""
        peer = self._transfers[0].peer
        return -1 if peer is None else peer


class MpiEngine(QueuedEngine):
    """Kernels of ranks that share an MPI communicator.

    Args:
        channel: the way to the other ranks.
        name: name of the group, for its thread.
        leave: called once, when nothing runs any more; frees the communicator when all have left.
    """

    backend = "mpi4py"

    def __init__(self, channel: Channel, name: str, leave: Callable[[MpiEngine], None]) -> None:
        kind = JobQueue if channel.threads.has_background else InlineJobs
        jobs = kind(f"unisono-mpi-{name or 'group'}")
        super().__init__(channel.rank, channel.watch.ranks, jobs)
        self.channel = channel
        self.messages = Messages(channel)
        self.is_broken = False
        """Whether something went wrong, so that transfers may be open for ever."""
        self._leave = leave
        jobs.chore = self.messages.progress
        jobs.has_chores = lambda: self.messages.under_way > 0 and self.cause is None

    # -- collectives ----------------------------------------------------------------------------

    def all_reduce_(self, x: Tensor, op: str, **how: Unpack[How]) -> Ticket | None:
        """Replace `x` on every rank by the reduction over all ranks."""
        check_op(op, x.dtype)
        return self._start("all_reduce", kernels.all_reduce, (x, op), **how)

    def reduce_(self, x: Tensor, dst: int, op: str, **how: Unpack[How]) -> Ticket | None:
        """Replace `x` on `dst` by the reduction; leaves `x` as it is on the other ranks."""
        check_op(op, x.dtype)
        return self._start("reduce", kernels.all_reduce, (x, op, dst), **how)

    def reduce_scatter(
        self, out: Tensor, ins: Sequence[Tensor], op: str, *, alike: int = 0, **how: Unpack[How]
    ) -> Ticket | None:
        """Fill `out` of rank `r` with the reduction over ranks of `ins[r]`."""
        del alike  # ranks do not compare their calls
        check_op(op, out.dtype)
        return self._start("reduce_scatter", kernels.reduce_scatter, (out, ins, op), **how)

    def broadcast_(self, x: Tensor, src: int, **how: Unpack[How]) -> Ticket | None:
        """Replace `x` on every rank by `x` of `src`."""
        return self._start("broadcast", kernels.broadcast, (x, src), **how)

    def all_gather(
        self, outs: Sequence[Tensor], x: Tensor, *, alike: int = 0, **how: Unpack[How]
    ) -> Ticket | None:
        """Fill `outs[q]` with `x` of rank `q`."""
        del alike
        return self._start("all_gather", kernels.all_gather, (outs, x), **how)

    def all_to_all(
        self, outs: Sequence[Tensor], ins: Sequence[Tensor], **how: Unpack[How]
    ) -> Ticket | None:
        """Fill `outs[q]` with `ins[r]` of rank `q`."""
        return self._start("all_to_all", kernels.all_to_all, (outs, ins), **how)

    def gather(
        self, outs: Sequence[Tensor] | None, x: Tensor, dst: int, **how: Unpack[How]
    ) -> Ticket | None:
        """Fill `outs[q]` of `dst` with `x` of rank `q`; `outs` is None on the other ranks."""
        return self._start("gather", kernels.gather, (outs, x, dst), **how)

    def scatter(
        self, out: Tensor, ins: Sequence[Tensor] | None, src: int, **how: Unpack[How]
    ) -> Ticket | None:
        """Fill `out` of rank `r` with `ins[r]` of `src`; `ins` is None on the other ranks."""
        return self._start("scatter", kernels.scatter, (out, ins, src), **how)

    def barrier(self, **how: Unpack[How]) -> Ticket | None:
        """Complete when every rank of the group has called it."""
        return self._start("barrier", kernels.barrier, (), **how)

    def all_gather_ints(self, values: Sequence[int], *, timeout_s: float) -> list[tuple[int, ...]]:
        """Return the tuples of all ranks, in rank order."""
        rows: list[tuple[int, ...]] = []
        how: How = {"async_op": False, "timeout_s": timeout_s}
        self._start("all_gather_ints", kernels.all_gather_ints, (values, rows), **how)
        return rows

    def _start(
        self, name: str, kernel: Kernel, arguments: tuple[Any, ...], **how: Unpack[How]
    ) -> Ticket | None:
        self.channel.threads.check(name)
        return self.call(name, partial(self._guarded, kernel, arguments), **how)

    def _guarded(self, kernel: Kernel, arguments: tuple[Any, ...]) -> None:
        with self.channel.kernel():
            self.last_algorithm = kernel(self.channel, *arguments) or "native"

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
        """Send to and receive from the listed peers at once. Not queued behind collectives."""
        self.check_usable()
        self.channel.threads.check("send or recv")
        transfers = [self.messages.post_recv(src, tag, x) for src, x in recvs]
        transfers += [self.messages.post_send(dst, tag, x) for dst, x in sends]
        if async_op:
            return self._under_way(transfers)
        self.finish_messages(transfers, timeout_s)
        return None

    def receive_any(self, x: Tensor, tag: int) -> SourceTicket:
        """Start to receive a message with `tag` from whoever sends one first."""
        self.check_usable()
        self.channel.threads.check("recv")
        return self._under_way([self.messages.post_recv(None, tag, x)])

    def _under_way(self, transfers: Sequence[Transfer]) -> MessageTicket:
        """Return a ticket of messages, which move on while nobody waits for them."""
        self.messages.progress()
        if self.messages.under_way:
            self.jobs.wake()
        return MessageTicket(self, transfers)

    def finish_messages(self, transfers: Sequence[Transfer], timeout_s: float) -> None:
        """Wait for messages of this rank."""
        if all(transfer.is_done and transfer.error is None for transfer in transfers):
            return
        self.check_usable()
        self.channel.watch.doing = "send or recv"
        try:
            self.messages.wait(transfers, timeout_s)
        except BaseException as error:
            self.fail(error)
            raise

    # -- life -----------------------------------------------------------------------------------

    @property
    def waited_ns(self) -> int:  # type: ignore[override]
        """Time this rank has spent waiting for others so far."""
        return self.channel.waited_ns

    def prepare(self, name: str, timeout_s: float) -> None:
        """Set up for one kernel; called in the thread that runs it."""
        channel = self.channel
        channel.timeout_s = timeout_s
        channel.behind = self.jobs.in_background
        channel.watch.doing = name
        channel.watch.number += 1

    def tell_failure(self, error: BaseException) -> None:
        """Let the other ranks know that this one has failed."""
        self.is_broken = True
        if isinstance(error, RankFailed):
            return  # the others learn of it as this rank did
        if isinstance(error, UnisonoError):  # says enough by itself
            text = "".join(traceback.format_exception_only(error)).strip()
        else:
            text = "".join(traceback.format_exception(error)).strip()
        if len(text) > _TEXT_LIMIT:
            text = f"{text[: _TEXT_LIMIT // 2]}\n[...]\n{text[-_TEXT_LIMIT // 2 :]}"
        watch = self.channel.watch
        kind = "timeout" if isinstance(error, RankTimeout) else "failed"
        host, culprit = socket.gethostname(), self.culprit(error)
        watch.board.post(Notice(kind, watch.me, culprit, watch.number, host, text))

    def cancel(self, why: str) -> None:
        """End the wait of the call under way, from another thread."""
        self.channel.watch.cancelled = why

    def release(self) -> None:
        """Give everything back; nothing runs any more."""
        if not self.channel.mpi.Is_finalized():
            self.messages.release()
            self._leave(self)
