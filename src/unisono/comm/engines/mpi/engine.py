"""The engine of a group whose ranks talk over an MPI communicator: its calls and its messages.

Messages between pairs of ranks are posted at once, in any order with collectives. MPI matches them
by source and tag, in the order in which they were posted. They move on whenever this process is
inside MPI; the group's background thread looks after them when nobody waits.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypedDict, Unpack

from torch import Tensor
from torch.distributed import Store

from unisono.comm.engines.base import Ticket
from unisono.comm.engines.mpi import kernels
from unisono.comm.engines.mpi.channel import MAX_BYTES, Channel, Wait, abandon
from unisono.comm.engines.queued import Job, JobQueue, QueuedEngine, SourceTicket
from unisono.comm.messages import EXCHANGE_TAG
from unisono.comm.reductions import check_op
from unisono.comm.torch.staging import wrong_message
from unisono.errors import UnisonoError

Kernel = Callable[..., str | None]
"""Does a whole collective over a channel; a reduction returns how it was done."""

_RESERVED_TAGS = 2
"""The largest tags a group keeps for itself: goodbyes, and `exchange` where tags are few."""


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


class Transfer:
    """A message this rank sends or receives.

    Attributes:
        peer: the other rank of the group; None until it is known.
        is_done: whether it has ended, well or badly.
        error: what went wrong.
    """

    __slots__ = ("error", "is_done", "is_receive", "peer", "requests", "tag", "tensor")

    def __init__(self, tensor: Tensor, peer: int | None, tag: int, is_receive: bool) -> None:
        self.tensor = tensor
        self.tag = tag
        self.peer = peer
        self.is_receive = is_receive
        self.requests: list[tuple[Any, int]] = []
        """MPI requests with the bytes of each."""
        self.is_done = False
        self.error: BaseException | None = None


class Messages:
    """Messages of one rank in one group.

    Args:
        channel: the group's channel.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self._under_way: list[Transfer] = []

    @property
    def under_way(self) -> int:
        """How many messages have not ended."""
        return len(self._under_way)

    def post_send(self, dst: int, tag: int, x: Tensor) -> Transfer:
        """Start to send `x` to rank `dst`."""
        return self._post(Transfer(x, dst, tag, False), self._channel.comm.Isend, dst)

    def post_recv(self, src: int | None, tag: int, x: Tensor) -> Transfer:
        """Start to receive `x` from rank `src`, or from anybody."""
        channel = self._channel
        if src is None and x.nbytes > channel.chunk_bytes:
            raise UnisonoError.because(
                "a receive from anybody",
                f"{x.nbytes} bytes, which travel in several messages",
                f"{x.nbytes} > {channel.chunk_bytes}",
                "name the source",
            )
        source = channel.mpi.ANY_SOURCE if src is None else src
        return self._post(Transfer(x, src, tag, True), channel.comm.Irecv, source)

    def _post(self, transfer: Transfer, call: Any, peer: int) -> Transfer:
        channel, x = self._channel, transfer.tensor
        wire_tag = self._wire_tag(transfer.tag)
        pieces = list(channel.pieces(x.nbytes)) or [(0, 0)]
        with self._lock:
            for begin, length in pieces:
                memory = channel.mpi.buffer.fromaddress(x.data_ptr() + begin, length)
                with channel.threads.lock:
                    request = call([memory, channel.mpi.BYTE], peer, wire_tag)
                transfer.requests.append((request, length))
            self._under_way.append(transfer)
        return transfer

    def _wire_tag(self, tag: int) -> int:
        free = self._channel.max_tag - _RESERVED_TAGS
        if 0 <= tag <= free:
            return tag
        if tag == EXCHANGE_TAG:  # an MPI with few tags
            return self._channel.max_tag - 1
        raise UnisonoError.because(
            f"a message with tag {tag}", f"this MPI has tags 0 to {free}", None, "a smaller tag"
        )

    def progress(self) -> bool:
        """Let messages move on; return whether one has ended."""
        if not self._under_way or not self._lock.acquire(blocking=False):
            return False
        try:
            before = len(self._under_way)
            for transfer in self._under_way:
                self._advance(transfer)
            self._under_way = [t for t in self._under_way if not t.is_done]
            return len(self._under_way) < before
        finally:
            self._lock.release()

    def _advance(self, transfer: Transfer) -> None:
        mpi = self._channel.mpi
        try:
            while transfer.requests:
                request, expected = transfer.requests[0]
                status = mpi.Status()
                with self._channel.threads.lock:
                    if not request.Test(status):
                        return
                transfer.requests.pop(0)
                if transfer.is_receive:
                    transfer.peer = status.Get_source()
                    found = status.Get_count(mpi.BYTE)
                    if found != expected and transfer.error is None:
                        transfer.error = self._wrong(transfer, found)
        except mpi.Exception as error:
            abandon(transfer.tensor, transfer.requests)  # later pieces may still arrive in it
            transfer.requests = []
            is_long = error.Get_error_class() == mpi.ERR_TRUNCATE and transfer.peer is not None
            transfer.error = (
                self._wrong(transfer, None) if is_long else self._channel.translated(error)
            )
        transfer.is_done = True

    def _wrong(self, transfer: Transfer, found: int | None) -> UnisonoError:
        """Return the error for a message of another length; None is one that is too long."""
        sender = -1 if transfer.peer is None else self._channel.watch.ranks[transfer.peer]
        return wrong_message(transfer.tensor, sender, found, transfer.tag)

    def wait(self, transfers: Sequence[Transfer], timeout_s: float) -> None:
        """Wait for messages; raises what went wrong with one of them."""
        self.progress()
        waiting = [transfer for transfer in transfers if not transfer.is_done]
        if waiting:
            began = time.perf_counter_ns()
            peers = sorted({t.peer for t in waiting if t.peer is not None})
            nbytes = sum(transfer.tensor.nbytes for transfer in waiting)
            wait = Wait(self._channel.watch, timeout_s, min(nbytes, MAX_BYTES), peers)
            while not all(transfer.is_done for transfer in waiting):
                self._channel.step(wait)
                self.progress()
            self._channel.waited_ns += time.perf_counter_ns() - began
        for transfer in transfers:
            if transfer.error is not None:
                raise transfer.error

    def release(self) -> None:
        """Let go of messages that never ended: what is not received yet, never will be."""
        channel = self._channel
        with self._lock:
            for transfer in self._under_way:
                for request, _ in transfer.requests if transfer.is_receive else []:
                    # What cannot be cancelled stays as it is, and so does its memory.
                    with channel.threads.lock, contextlib.suppress(channel.mpi.Exception):
                        request.Cancel()
                        request.Test()
                abandon(transfer)
            self._under_way = []


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
        store: store of the group.
        leave: called once, when nothing runs any more; frees the communicator when all have left.
    """

    backend = "mpi4py"

    def __init__(
        self, channel: Channel, name: str, store: Store, leave: Callable[[MpiEngine], None]
    ) -> None:
        kind = JobQueue if channel.threads.has_background else InlineJobs
        jobs = kind(f"unisono-mpi-{name or 'group'}")
        super().__init__(channel.rank, channel.watch.ranks, jobs)
        self.channel = channel
        self.messages = Messages(channel)
        self._store = store  # kept: served by this rank perhaps, and wanted until all have left
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
        self._check_messages()
        transfers = [self.messages.post_recv(src, tag, x) for src, x in recvs]
        transfers += [self.messages.post_send(dst, tag, x) for dst, x in sends]
        if async_op:
            return self._under_way(transfers)
        self.finish_messages(transfers, timeout_s)
        return None

    def receive_any(self, x: Tensor, tag: int) -> SourceTicket:
        """Start to receive a message with `tag` from whoever sends one first."""
        self._check_messages()
        return self._under_way([self.messages.post_recv(None, tag, x)])

    def _check_messages(self) -> None:
        self.check_usable()
        self.channel.threads.check("send or recv")

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
        self.channel.watch.tell(error, self.culprit(error))

    def cancel(self, why: str) -> None:
        """End the wait of the call under way, from another thread."""
        self.channel.watch.cancelled = why

    def release(self) -> None:
        """Give everything back; nothing runs any more."""
        if not self.channel.mpi.Is_finalized():
            self.messages.release()
            self._leave(self)
