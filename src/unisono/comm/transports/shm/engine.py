"""The kernels of a group whose ranks share one host, on top of shared memory."""

from __future__ import annotations

import math
import traceback
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from unisono.comm.engine import Ticket
from unisono.comm.transports.jobs import JobQueue
from unisono.comm.transports.queued import QueuedEngine, SourceTicket
from unisono.comm.transports.rank_order import reducer
from unisono.comm.transports.shm import moves, sums
from unisono.comm.transports.shm.allocation import make_shared_buffer
from unisono.comm.transports.shm.board import Board
from unisono.comm.transports.shm.control import Control
from unisono.comm.transports.shm.layout import FAILED, GAVE_UP, NOTE_INTS, Layout
from unisono.comm.transports.shm.messages import Messages, Transfer
from unisono.comm.transports.shm.notes import Note, Notes
from unisono.comm.transports.shm.segment import Segment
from unisono.comm.transports.shm.waiting import CounterSync, SemaphoreSync
from unisono.comm.transports.shm.watch import Watch
from unisono.errors import RankTimeout, UnisonoError


class MessageTicket:
    """Messages under way, as the verbs see them."""

    def __init__(self, engine: ShmEngine, transfers: Sequence[Transfer]) -> None:
        self._engine = engine
        self._transfers = transfers

    def wait(self, timeout_s: float) -> None:
        """See `Ticket`."""
        self._engine.finish_messages(self._transfers, timeout_s)

    def done(self) -> bool:
        """See `Ticket`."""
        self._engine.messages.progress()
        return all(transfer.done for transfer in self._transfers)

    @property
    def source(self) -> int:
        """See `SourceTicket`."""
        peer = self._transfers[0].peer
        return -1 if peer is None else peer


class PostedNote:
    """A note, as the verbs see it: a wait in vain breaks the group."""

    def __init__(self, engine: ShmEngine, note: Note) -> None:
        self._engine = engine
        self._note = note

    @property
    def rows(self) -> list[tuple[int, ...]] | None:
        """See `NoteTicket`."""
        return self._note.rows

    def wait(self, timeout_s: float) -> None:
        """See `Ticket`."""
        if self._note.rows is None:
            self._engine.read_note(self._note, timeout_s)

    def done(self) -> bool:
        """See `Ticket`."""
        return self._note.done()


class ShmEngine(QueuedEngine):
    """Kernels of ranks that share a segment.

    Args:
        segment: the group's segment, mapped by all ranks.
        layout: its layout.
        rank: own place in it.
        ranks: world rank of each rank of the segment, for messages.
        processes: process id and start time of each rank.
        jobs: order of calls, shared with the process group.
        semaphores: whether ranks meet by semaphores instead of counters.
        max_mb: limit on the shared memory of the group.
    """

    backend = "shm"
    knows_mean = True
    last_algorithm = "shm"

    def __init__(
        self,
        segment: Segment,
        layout: Layout,
        rank: int,
        ranks: Sequence[int],
        processes: Sequence[tuple[int, int]],
        jobs: JobQueue,
        *,
        semaphores: bool = False,
        max_mb: float | None = None,
    ) -> None:
        super().__init__(rank, ranks, jobs)
        self._max_bytes = math.inf if max_mb is None else max_mb * 1024 * 1024
        self._kind = segment.ticket.kind
        self._own_bytes = layout.rings
        self.control = Control(segment, layout, rank, processes)
        self.watch = Watch(self.control, ranks)
        kind = SemaphoreSync if semaphores else CounterSync
        self.sync = kind(self.control, self.watch)
        self.board = Board(segment, layout, self.control, self.sync, ranks)
        self.messages = Messages(self.control, self.watch, semaphores=semaphores)
        self.notes = Notes(self.control, self.watch, self.messages.progress)
        self.note_ints = 0 if semaphores else NOTE_INTS
        self.sync.idle = self.messages.progress
        jobs.chore = self.messages.progress
        jobs.has_chores = self._has_chores
        self.control.join()

    # -- collectives ----------------------------------------------------------------------------

    def all_reduce_(self, x: Tensor, op: str, *, async_op: bool, timeout_s: float) -> Ticket | None:
        """See `Engine`."""
        kernel = partial(sums.all_reduce, self.board, x, reducer(x.dtype, op))
        return self.call("all_reduce", kernel, async_op, timeout_s)

    def reduce_(
        self, x: Tensor, dst: int, op: str, *, async_op: bool, timeout_s: float
    ) -> Ticket | None:
        """See `Engine`; leaves `x` as it is on the other ranks."""
        kernel = partial(sums.all_reduce, self.board, x, reducer(x.dtype, op), dst)
        return self.call("reduce", kernel, async_op, timeout_s)

    def broadcast_(self, x: Tensor, src: int, *, async_op: bool, timeout_s: float) -> Ticket | None:
        """See `Engine`."""
        kernel = partial(moves.broadcast, self.board, x, src)
        return self.call("broadcast", kernel, async_op, timeout_s)

    def all_gather(
        self, outs: Sequence[Tensor], x: Tensor, *, alike: int = 0, async_op: bool, timeout_s: float
    ) -> Ticket | None:
        """See `Engine`."""
        kernel = partial(moves.all_gather, self.board, outs, x, alike)
        return self.call("all_gather", kernel, async_op, timeout_s)

    def reduce_scatter(
        self,
        out: Tensor,
        ins: Sequence[Tensor],
        op: str,
        *,
        alike: int = 0,
        async_op: bool,
        timeout_s: float,
    ) -> Ticket | None:
        """See `Engine`."""
        rule = reducer(out.dtype, op)
        kernel = partial(sums.reduce_scatter, self.board, out, ins, rule, alike)
        return self.call("reduce_scatter", kernel, async_op, timeout_s)

    def all_to_all(
        self, outs: Sequence[Tensor], ins: Sequence[Tensor], *, async_op: bool, timeout_s: float
    ) -> Ticket | None:
        """See `Engine`."""
        kernel = partial(moves.all_to_all, self.board, outs, ins)
        return self.call("all_to_all", kernel, async_op, timeout_s)

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
        kernel = partial(moves.gather, self.board, outs, x, dst)
        return self.call("gather", kernel, async_op, timeout_s)

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
        kernel = partial(moves.scatter, self.board, out, ins, src)
        return self.call("scatter", kernel, async_op, timeout_s)

    def barrier(self, *, async_op: bool, timeout_s: float) -> Ticket | None:
        """See `Engine`."""
        return self.call("barrier", partial(moves.barrier, self.board), async_op, timeout_s)

    def all_gather_ints(self, values: Sequence[int], *, timeout_s: float) -> list[tuple[int, ...]]:
        """See `Engine`."""
        rows: list[tuple[int, ...]] = []

        def kernel() -> None:
            rows.extend(moves.all_gather_ints(self.board, values))

        self.call("all_gather_ints", kernel, False, timeout_s)
        return rows

    def shared_buffer(
        self, shape: Sequence[int], dtype: torch.dtype, *, timeout_s: float
    ) -> Tensor:
        """See `Engine`: zeros in shared memory, freed when they have died on all ranks."""
        made: list[Tensor] = []

        def kernel() -> None:
            room = self._max_bytes - self._own_bytes - self.board.buffers.nbytes
            made.append(make_shared_buffer(self.board, shape, dtype, kind=self._kind, room=room))

        self.call("shared_buffer", kernel, False, timeout_s)
        return made[0]

    def shared_views(self, buffer: Tensor) -> list[Tensor] | None:
        """See `Engine`."""
        nbytes = buffer.numel() * buffer.element_size()
        place = self.board.buffers.place(buffer.data_ptr(), nbytes)
        found = self.board.buffers.find([place])
        if found is None:
            return None
        shared, (offset,) = found
        regions = [shared.region(rank, offset, nbytes) for rank in range(self.size)]
        return [torch.from_numpy(r).view(buffer.dtype).view(buffer.shape) for r in regions]

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
        transfers = [self.messages.post_recv(src, tag, x) for src, x in recvs]
        transfers += [self.messages.post_send(dst, tag, x) for dst, x in sends]
        if not async_op:
            self.finish_messages(transfers, timeout_s)
            return None
        self.start_messages()
        return MessageTicket(self, transfers)

    def receive_any(self, x: Tensor, tag: int) -> SourceTicket:
        """See `QueuedEngine`."""
        self.check_usable()
        transfer = self.messages.post_recv(None, tag, x)
        self.start_messages()
        return MessageTicket(self, [transfer])

    def start_messages(self) -> None:
        """See to it that messages posted so far move on while nobody waits for them."""
        self.messages.progress()
        self._leave_messages()

    def _leave_messages(self) -> None:
        """Hand what is still under way to the background thread, at once only if a peer waits."""
        if self.messages.under_way:
            if self.messages.overflows:
                self.jobs.wake()
            else:
                self.jobs.mention()

    def finish_messages(self, transfers: Sequence[Transfer], timeout_s: float) -> None:
        """Wait for messages of this rank."""
        if all(transfer.done and transfer.error is None for transfer in transfers):
            return
        self.check_usable()
        self.watch.doing = "send or recv"
        try:
            self.messages.wait(transfers, timeout_s)
        except BaseException as error:
            self.fail(error)
            raise
        self._leave_messages()  # the background thread rested while this one moved them on

    def post_note(self, values: Sequence[int], *, timeout_s: float) -> PostedNote:
        """See `Engine`."""
        self.check_usable()
        return PostedNote(self, self.notes.post(values, timeout_s))

    def read_note(self, note: Note, timeout_s: float) -> None:
        """Wait for the notes of all ranks."""
        self.check_usable()
        self.watch.doing = "post_ints"
        try:
            note.wait(timeout_s)
        except BaseException as error:
            self.fail(error)
            raise

    # -- life -----------------------------------------------------------------------------------

    @property
    def waited_ns(self) -> int:  # type: ignore[override]
        """See `Engine`."""
        return self.sync.waited_ns + self.messages.waited_ns

    def prepare(self, name: str, timeout_s: float) -> None:
        """See `QueuedEngine`."""
        sync = self.sync
        sync.timeout_s = timeout_s
        sync.behind = self.jobs.in_background
        self.watch.doing = name

    def tell_failure(self, error: BaseException) -> None:
        """See `QueuedEngine`."""
        if isinstance(error, UnisonoError):  # says enough by itself
            lines = traceback.format_exception_only(error)
        else:
            lines = traceback.format_exception(error)
        state = GAVE_UP if isinstance(error, RankTimeout) else FAILED
        self.control.fail(self.culprit(error), "".join(lines).strip(), state)

    def _has_chores(self) -> bool:
        return self.messages.needs_background and self.cause is None

    def cancel(self, why: str) -> None:
        """See `QueuedEngine`."""
        self.watch.cancelled = why

    def release(self) -> None:
        """See `QueuedEngine`: tell the others, and give the memory back."""
        self.control.close()
        self.messages.release()
        self.board.release()
        self.control.release()
