"""The kernels of a group whose ranks share one host: the compiled core, seen from Python."""

from __future__ import annotations

import contextlib
import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from unisono.comm.engines import core
from unisono.comm.engines.base import Blocks, How, Messages, SourceTicket, Ticket
from unisono.comm.engines.core import SegmentTicket, SharedSegment
from unisono.comm.engines.signature import OP_NUMBERS, mismatch, name_of, wrong_block
from unisono.comm.engines.transport import TransportEngine, Watch
from unisono.comm.health import failures
from unisono.comm.reductions import DTYPE_NUMBERS, DTYPES
from unisono.comm.torch.staging import wrong_message
from unisono.cores import usable_cores
from unisono.errors import RankTimeout, UnisonoError

FAILED, CLOSED, GAVE_UP = 2, 3, 4
"""States of a rank that comes no more, as the core numbers them: its deadline may have passed."""

_MISMATCH, _SIZES, _ABORTED, _REFUSED = 1, 2, 3, 4
_TEXT_BYTES = 2048
_PAGE, _MB = 4096, 1 << 20
_FIRST = _PAGE + 512
"""Where the region of rank 0 begins in a shared buffer: a copy between places that lie equally far
from the start of a page can be slow, and large tensors lie 64 bytes from it."""
_STAGGER = 1024
_POPULATED_BYTES = 32 * _MB
"""Slots of all ranks are mapped page by page at once up to here: else that takes each of many ranks
longer than all the rest of its start. Pages that are used later are mapped then."""
_MOST_KEPT = 16
"""Calls under way, from which on all of them are looked at."""
_LEAST_RUN, _MOST_DIMS = 256, 8
"""Slices of a tensor that messages take from where they lie: bytes of a run, and dims around it."""


def _listed(blocks: Blocks | None) -> list[tuple[int, int]] | None:
    if blocks is None:
        return None
    return [(block.data_ptr(), block.nbytes) for block in blocks]


class ShmWatch(Watch):
    """Knows what ranks have said in the segment."""

    group: Any = None
    """The core's group, which knows the states of all ranks."""

    def hear(self, doing: str, missing: Sequence[int] | None) -> None:
        for rank in missing or ():
            state, culprit, raw = self.group.state(rank)
            reported = (self.ranks[rank], culprit, self.host, raw.decode(errors="replace"))
            if state == FAILED:
                raise failures.peer_failed(doing, self.me, *reported)
            if state == GAVE_UP:
                raise failures.peer_gave_up(doing, self.me, *reported)
            if state == CLOSED:
                raise failures.peer_left(doing, self.me, [self.ranks[rank]])


class ShmEngine(TransportEngine):
    """Kernels of ranks that share a segment.

    Args:
        segment: the group's segment, mapped by all ranks.
        slot_bytes: size of its slots.
        rank: own place in it.
        ranks: world rank of each rank of the segment, for messages.
        processes: process id and start time of each rank.
    """

    backend = "shm"
    last_algorithm = "shm"

    def __init__(
        self,
        segment: SharedSegment,
        slot_bytes: int,
        rank: int,
        ranks: Sequence[int],
        processes: Sequence[tuple[int, int]],
    ) -> None:
        super().__init__(rank, ranks)
        module, size = core.load(), self.size
        _, common, slots_bytes, self._rings, self._ring_bytes = module.layout(size, slot_bytes)
        if size * slots_bytes <= _POPULATED_BYTES:
            module.populate(segment.address, common + size * slots_bytes)
        self._address = segment.address
        self._touched: set[int] = set()
        self._kept: deque[Any] = deque()
        self.watch = ShmWatch(rank, ranks, processes)
        own_cores = size <= usable_cores()
        weak: weakref.ref[ShmEngine] = weakref.ref(self)
        self._core = module.Group(
            segment.memory,
            size,
            slot_bytes,
            rank,
            own_cores,
            lambda verb, *wait: _of(weak).watch.look(name_of(verb), *wait),
            lambda *trouble: _of(weak)._report(*trouble),
        )
        self.watch.group = self._core

    # -- collectives ----------------------------------------------------------------------------

    def all_reduce_(self, x: Tensor, op: str, **how: Unpack[How]) -> Ticket | None:
        return self._reduce(x, op, -1, how)

    def reduce_(self, x: Tensor, dst: int, op: str, **how: Unpack[How]) -> Ticket | None:
        """See `Engine`; leaves `x` as it is on the other ranks."""
        return self._reduce(x, op, dst, how)

    def _reduce(self, x: Tensor, op: str, root: int, how: How) -> Ticket | None:
        what = x.data_ptr(), x.numel(), DTYPE_NUMBERS[x.dtype], OP_NUMBERS[op]
        return self._collective(self._core.all_reduce, x, how, *what, root)

    def _collective(
        self, call: Callable[..., Any], tensors: object, how: How, *args: object
    ) -> Ticket | None:
        """Make a call of the core; of one that is only started the tensors are kept alive."""
        if self.cause is not None:
            raise self.unusable()
        started = call(tensors if how["async_op"] else None, how["timeout_s"], *args)
        return None if started is None else self._keep(started)

    def broadcast_(self, x: Tensor, src: int, **how: Unpack[How]) -> Ticket | None:
        what = x.data_ptr(), x.nbytes, DTYPE_NUMBERS.get(x.dtype, -1)
        return self._collective(self._core.broadcast, x, how, *what, src)

    def all_gather(
        self, outs: Blocks, x: Tensor, *, alike: int = 0, **how: Unpack[How]
    ) -> Ticket | None:
        what = _listed(outs), x.data_ptr(), DTYPE_NUMBERS.get(x.dtype, -1)
        return self._collective(self._core.all_gather, (outs, x), how, *what, alike)

    def all_gather_rows(
        self,
        out: Tensor,
        lengths: Sequence[int],
        x: Tensor,
        *,
        alike: int = 0,
        **how: Unpack[How],
    ) -> Ticket | None:
        """See `Engine`; makes no tensor per block."""
        at, rows = out.data_ptr(), out.shape[0]
        each = out.nbytes // rows if rows else 0
        blocks: list[tuple[int, int]] = []
        for length in lengths:
            blocks.append((at, length * each))
            at += length * each
        what = blocks, x.data_ptr(), DTYPE_NUMBERS.get(x.dtype, -1)
        return self._collective(self._core.all_gather, (out, x), how, *what, alike)

    def reduce_scatter(
        self, out: Tensor, ins: Blocks, op: str, *, alike: int = 0, **how: Unpack[How]
    ) -> Ticket | None:
        what = out.data_ptr(), _listed(ins), DTYPE_NUMBERS[out.dtype], OP_NUMBERS[op]
        return self._collective(self._core.reduce_scatter, (out, ins), how, *what, alike)

    def all_to_all(self, outs: Blocks, ins: Blocks, **how: Unpack[How]) -> Ticket | None:
        what = _listed(outs), _listed(ins), DTYPE_NUMBERS.get(ins[0].dtype, -1)
        return self._collective(self._core.all_to_all, (outs, ins), how, *what)

    def gather(self, outs: Blocks | None, x: Tensor, dst: int, **how: Unpack[How]) -> Ticket | None:
        what = _listed(outs), x.data_ptr(), x.nbytes, DTYPE_NUMBERS.get(x.dtype, -1)
        return self._collective(self._core.gather, (outs, x), how, *what, dst)

    def scatter(
        self, out: Tensor, ins: Blocks | None, src: int, **how: Unpack[How]
    ) -> Ticket | None:
        what = out.data_ptr(), out.nbytes, _listed(ins), DTYPE_NUMBERS.get(out.dtype, -1)
        return self._collective(self._core.scatter, (out, ins), how, *what, src)

    def barrier(self, **how: Unpack[How]) -> Ticket | None:
        return self._collective(self._core.barrier, (), how)

    def all_gather_ints(self, values: Sequence[int], *, timeout_s: float) -> list[tuple[int, ...]]:
        if self.cause is not None:
            raise self.unusable()
        return self._core.ints(timeout_s, values)

    def _keep(self, ticket: Any) -> Any:
        """Return the ticket of a started call; its tensors stay alive until it has ended."""
        kept = self._kept
        while kept and kept[0].done():  # they end in about this order
            kept.popleft()
        if len(kept) > _MOST_KEPT:  # behind a message that is never sent
            kept = self._kept = deque(other for other in kept if not other.done())
        kept.append(ticket)
        return ticket

    # -- messages -------------------------------------------------------------------------------

    def exchange(
        self, sends: Messages, recvs: Messages, tag: int, *, async_op: bool, timeout_s: float
    ) -> Ticket | None:
        """See `Engine`. Messages do not queue behind collectives."""
        if self.cause is not None:
            raise self.unusable()
        numbers = DTYPE_NUMBERS
        rows: list[tuple[Any, ...]] = []
        for peer, x in (*sends, *recvs):
            row = peer, x, x.data_ptr(), x.nbytes, numbers.get(x.dtype, -1)
            # Of a slice the core asks for the bytes of an element, its shape and its strides.
            rows.append(
                row if x.is_contiguous() else (*row[:3], x.itemsize, row[4], x.shape, x.stride())
            )
        going, coming = rows[: len(sends)], rows[len(sends) :]
        for dst, *_ in going:
            if dst not in self._touched:
                self._touch(dst)
        ticket = self._core.post(going, coming, tag, not async_op)
        if async_op:
            return self._keep(ticket)
        ticket.wait(timeout_s)
        return None

    def moves(self, x: Tensor) -> bool:
        """See `Engine`. Of short runs torch packs many more in the same time."""
        return (
            x.stride(-1) == 1 and x.shape[-1] * x.itemsize >= _LEAST_RUN and x.dim() <= _MOST_DIMS
        )

    def receive_any(self, x: Tensor, tag: int) -> SourceTicket:
        ticket: Any = self.exchange([], [(-1, x)], tag, async_op=True, timeout_s=0.0)
        return ticket

    def _touch(self, dst: int) -> None:
        """Take the memory of the ring to `dst` before the first message goes through it."""
        place = self.rank * (self.size - 1) + (dst if dst < self.rank else dst - 1)
        offset = self._rings + place * self._ring_bytes
        core.load().populate(self._address + offset, self._ring_bytes)
        self._touched.add(dst)

    # -- shared buffers -------------------------------------------------------------------------

    def shared_buffer(
        self, shape: Sequence[int], dtype: torch.dtype, *, timeout_s: float
    ) -> Tensor:
        """See `Engine`: zeros in shared memory, freed when they have died on all ranks.

        Rank 0 makes the file, every rank takes the memory of its own region, or all refuse alike.
        """
        self.check_usable()
        count = math.prod(shape)
        nbytes = count * dtype.itemsize
        number = DTYPE_NUMBERS.get(dtype, -1)
        self._core.agree(timeout_s, number, nbytes, hash(tuple(shape)))
        if count == 0:
            return torch.zeros(tuple(shape), dtype=dtype, device="cpu")
        request = f"shared_buffer({tuple(shape)}, {dtype})"
        stride = -(-nbytes // _PAGE) * _PAGE + _STAGGER
        total = _FIRST + self.size * stride
        offset = _FIRST + self.rank * stride
        segment, problem = None, ""
        try:
            if self.rank == 0:
                with contextlib.suppress(OSError):  # the others are told of no ticket
                    segment = SharedSegment.create(total)
            ticket = self._texts("" if segment is None else str(segment.ticket), timeout_s)[0]
            if not ticket:
                raise UnisonoError.because(request, f"rank {self.ranks[0]} cannot make a segment")
            try:
                segment = segment or SharedSegment.open(SegmentTicket.parse(ticket))
                first = 0 if self.rank == 0 else offset
                segment.reserve(first, offset + nbytes - first, request)
            except (OSError, UnisonoError) as error:
                problem = f"rank {self.ranks[self.rank]}: {error}"
            problems = [text for text in self._texts(problem, timeout_s) if text]
        finally:
            if segment is not None:
                segment.seal()
        if problems or segment is None:
            raise UnisonoError.because(request, "ranks that cannot map it: " + "; ".join(problems))
        # Only now, when every rank has taken the memory of its own region.
        core.load().populate(segment.address, total)
        place = self._core.add_buffer(segment.address + _FIRST, stride, nbytes)
        # Without a reference to the engine, which the tensor would keep alive.
        weakref.finalize(segment.memory, self._core.drop_buffer, place).atexit = False
        flat = torch.frombuffer(segment.memory, dtype=dtype, count=count, offset=offset)
        return flat.view(tuple(shape))

    def _texts(self, text: str, timeout_s: float) -> list[str]:
        answers = self._core.texts(timeout_s, text.encode())
        return [raw.decode(errors="replace") for raw in answers]

    # -- trouble and the end --------------------------------------------------------------------

    @property
    def waited_ns(self) -> int:  # type: ignore[override]
        return self._core.waited_ns

    def _report(
        self,
        status: int,
        verb: int,
        looked: Any,
        rows: list[tuple[int, int, int]],
        table: list[int],
    ) -> BaseException:
        """Return the exception for a call that went wrong, and tell the others.

        Args:
            status: how it went wrong.
            verb: number of the call.
            looked: what the look during a wait has raised; of a refused message the receive.
            rows: code, bytes and digest of each rank's call; of a message sender, bytes and dtype.
            table: what ranks send and expect; of a message its tag.
        """
        error: BaseException
        if status == _ABORTED and isinstance(looked, BaseException):
            error = looked
        elif status == _REFUSED:
            (sender, nbytes, dtype), (_, x, *_) = rows[0], looked
            sent = DTYPES[dtype] if dtype >= 0 else None
            error = wrong_message(x, self.ranks[sender], nbytes, table[0], sent)
        elif status == _SIZES:
            error = mismatch(rows, self.ranks, self._wrong_sizes(verb, rows, table))
        else:
            error = mismatch(rows, self.ranks)
        self.fail(error)
        return error

    def _wrong_sizes(self, verb: int, rows: list[tuple[int, int, int]], table: list[int]) -> str:
        size, everyone = self.size, range(self.size)
        sent = [table[r * 2 * size : r * 2 * size + size] for r in everyone]
        expected = [table[r * 2 * size + size : (r + 1) * 2 * size] for r in everyone]
        root = (rows[self.rank][0] >> 24) - 1
        if name_of(verb) == "gather":  # the root alone has a row in the table
            sent = [[nbytes if d == root else 0 for d in everyone] for _, nbytes, _ in rows]
            expected = [expected[r] if r == root else [0] * size for r in everyone]
        if name_of(verb) == "scatter":
            expected = [[nbytes if s == root else 0 for s in everyone] for _, nbytes, _ in rows]
            sent = [sent[r] if r == root else [0] * size for r in everyone]
        return next(
            wrong_block(self.ranks, s, sent[s][d], d, expected[d][s])
            for s in everyone
            for d in everyone
            if sent[s][d] != expected[d][s]
        )

    def tell_failure(self, error: BaseException) -> None:
        raw = failures.text_of(error).encode(errors="replace")
        # The end of a traceback says most, and the beginning of a report.
        gave_up = isinstance(error, RankTimeout)
        text = raw[:_TEXT_BYTES] if gave_up else raw[-_TEXT_BYTES:]
        self._core.fail(GAVE_UP if gave_up else FAILED, self.culprit(error), text)

    def cancel(self, why: str) -> None:
        self.watch.cancelled = why

    def finish_started(self, timeout_s: float) -> bool:
        end = time.monotonic() + timeout_s
        for ticket in self._kept:
            is_call = hasattr(ticket, "ended")  # messages do not end by themselves
            if is_call and not ticket.ended(max(end - time.monotonic(), 0.0)):
                return False
        return True

    def release(self) -> None:
        """See `TransportEngine`: tell the others, and give the memory back."""
        self._core.close()
        self._core.release()
        self._kept.clear()


def _of(weak: weakref.ref[ShmEngine]) -> ShmEngine:
    engine = weak()
    if engine is None:
        raise UnisonoError("the group of this call is gone")
    return engine
