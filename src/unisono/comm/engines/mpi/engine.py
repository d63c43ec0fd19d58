"""The engine of a group whose ranks talk over an MPI communicator: its moves and its messages.

What only moves travels as bytes, so every dtype does, from where it lies. MPI promises no order of
additions. Where its order could show in the bits of a sum, ranks exchange their blocks and add them
in rank order themselves (`QueuedEngine`); elsewhere its own all-reduce serves.

Messages between pairs of ranks are posted at once, in any order with collectives. MPI matches them
by source and tag, in the order in which they were posted. They move on whenever this process is
inside MPI; the group's background thread looks after them when nobody waits.
"""

from __future__ import annotations

import contextlib
import itertools
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.distributed import Store

from unisono.comm.arguments import bytes_of
from unisono.comm.engines import base
from unisono.comm.engines.algorithms import forced_algorithms
from unisono.comm.engines.base import Blocks, How, SourceTicket, Ticket
from unisono.comm.engines.mpi.channel import MAX_BYTES, Channel, Wait, abandon
from unisono.comm.engines.queued import JobQueue, QueuedEngine
from unisono.comm.engines.signature import Signature, check
from unisono.comm.perform import EXCHANGE_TAG
from unisono.comm.reductions import BOOL_OPS, DTYPE_NUMBERS, DTYPES, accumulation_dtype
from unisono.comm.torch.staging import wrong_message
from unisono.errors import UnisonoError

COPIES_BYTES = 256 * 1024
"""Up to this many bytes over all ranks, every rank fetches all tensors and reduces them itself."""
SMALL_BYTES = 4 * 1024
"""Tensors up to this size are fetched whole by any number of ranks."""
_OPS: dict[str, str] = {
    "sum": "SUM",
    "sum64": "SUM",
    "mean": "SUM",
    "product": "PROD",
    "min": "MIN",
    "max": "MAX",
    "and": "BAND",
    "or": "BOR",
    "xor": "BXOR",
}
_KNOWN_TO_MPI = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
}
"""What MPI reduces for dtypes that it does not know."""
_RESERVED_TAGS = 2
"""The largest tags a group keeps for itself: goodbyes, and `exchange` where tags are few."""


_HEAD = struct.Struct("<2q")


def _head_of(x: Tensor) -> bytes:
    return _HEAD.pack(x.nbytes, DTYPE_NUMBERS.get(x.dtype, -1))


@dataclass(slots=True, eq=False)
class Transfer:
    """A message this rank sends or receives."""

    tensor: Tensor
    peer: int | None
    """The other rank of the group; None until it is known."""
    tag: int
    is_receive: bool
    head: bytearray
    """What a message tells first: its bytes and dtype."""
    requests: list[tuple[Any, int]] = field(default_factory=list)
    """MPI requests with the bytes of each."""
    is_done: bool = False
    """Whether it has ended, well or badly."""
    error: BaseException | None = None


class Messages:
    """Messages of one rank in one group.

    Args:
        channel: the group's channel.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self.under_way: list[Transfer] = []
        """Those that have not ended."""

    def post(self, peer: int | None, tag: int, x: Tensor, *, is_receive: bool) -> Transfer:
        """Start to send `x` to a rank, or to receive it from one (None: from anybody)."""
        channel, mpi = self._channel, self._channel.mpi
        if peer is None and x.nbytes > channel.chunk_bytes:
            raise UnisonoError.because(
                "a receive from anybody",
                f"{x.nbytes} bytes, which travel in several messages",
                f"{x.nbytes} > {channel.chunk_bytes}",
                "name the source",
            )
        head = bytearray(_HEAD.size) if is_receive else bytearray(_head_of(x))
        transfer, wire_tag = Transfer(x, peer, tag, is_receive, head), self._wire_tag(tag)
        call = channel.comm.Irecv if is_receive else channel.comm.Isend
        with self._lock:
            for begin, length in list(channel.pieces(x.nbytes)) or [(0, 0)]:
                lengths, places = [length], [x.data_ptr() + begin]
                if not begin:  # the first piece begins with the head
                    lengths.insert(0, _HEAD.size)
                    places.insert(0, mpi.Get_address(head))
                with channel.threads.lock:
                    kind = mpi.BYTE.Create_hindexed(lengths, places).Commit()
                    other = mpi.ANY_SOURCE if peer is None else peer
                    request = call([mpi.BOTTOM, 1, kind], other, wire_tag)
                    kind.Free()  # MPI keeps it until the message has gone
                transfer.requests.append((request, sum(lengths)))
            self.under_way.append(transfer)
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
        """Let messages move on; return whether some are still under way."""
        if self.under_way and self._lock.acquire(blocking=False):
            try:
                for transfer in self.under_way:
                    self._advance(transfer)
                self.under_way = [t for t in self.under_way if not t.is_done]
            finally:
                self._lock.release()
        return bool(self.under_way)

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
                    found = status.Get_elements(mpi.BYTE)
                    is_right = found == expected and transfer.head == _head_of(transfer.tensor)
                    if not is_right and transfer.error is None:
                        transfer.error = self._wrong(transfer, *_HEAD.unpack(transfer.head))
        except mpi.Exception as error:
            abandon(transfer.tensor, transfer.requests)  # later pieces may still arrive in it
            transfer.requests = []
            is_long = error.Get_error_class() == mpi.ERR_TRUNCATE and transfer.peer is not None
            transfer.error = (
                self._wrong(transfer, "longer") if is_long else self._channel.translated(error)
            )
        transfer.is_done = True

    def _wrong(self, transfer: Transfer, found: int | str, number: int = -1) -> UnisonoError:
        """Return the error for a message of another length or dtype; see `wrong_message`."""
        sender = -1 if transfer.peer is None else self._channel.watch.ranks[transfer.peer]
        sent = DTYPES[number] if 0 <= number < len(DTYPES) else None
        return wrong_message(transfer.tensor, sender, found, transfer.tag, sent)

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
            for transfer in self.under_way:
                for request, _ in transfer.requests if transfer.is_receive else []:
                    # What cannot be cancelled stays as it is, and so does its memory.
                    with channel.threads.lock, contextlib.suppress(channel.mpi.Exception):
                        request.Cancel()
                        request.Test()
                abandon(transfer)
            self.under_way = []


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
        jobs = JobQueue(f"unisono-mpi-{name or 'group'}", has_thread=channel.threads.has_background)
        super().__init__(channel.rank, channel.watch.ranks, jobs)
        self.channel = channel
        self.messages = Messages(channel)
        self._store = store  # kept: served by this rank perhaps, and wanted until all have left
        self.is_broken = False
        """Whether something went wrong, so that transfers may be open for ever."""
        self._leave = leave
        jobs.chore = lambda: self.cause is None and self.messages.progress()

    # -- collectives ----------------------------------------------------------------------------

    def fetches_whole(self, nbytes: int) -> bool:
        return nbytes <= SMALL_BYTES or nbytes * self.size <= COPIES_BYTES

    def _all_reduce(self, x: Tensor, op: str) -> None:
        forced = forced_algorithms().get("all_reduce")
        is_float = x.dtype.is_floating_point or x.dtype.is_complex
        is_exact = not is_float or (
            self.size == 2 and x.dtype.itemsize >= 4 and op in ("sum", "mean")
        )
        if not x.numel() or (forced != "native" and (forced is not None or not is_exact)):
            super()._all_reduce(x, op)
            return
        channel, mpi = self.channel, self.channel.mpi
        wide = accumulation_dtype(x.dtype, op)
        wide = _KNOWN_TO_MPI.get(wide, wide)
        is_bool = x.dtype == torch.bool
        operation = getattr(mpi, f"L{BOOL_OPS.get(op, op)}".upper() if is_bool else _OPS[op])
        total = x if wide == x.dtype else x.to(wide)
        for part in total.view(-1).split(max(1, channel.chunk_bytes // total.element_size())):
            channel.hold([part])
            channel.start(channel.comm.Iallreduce, mpi.IN_PLACE, part.detach().numpy(), operation)
        channel.finish()
        if op == "mean":
            total.div_(self.size)
        if total is not x:
            x.copy_(total)

    def _broadcast(self, x: Tensor, src: int) -> None:
        channel = self.channel
        for begin, length in channel.pieces(x.nbytes):
            part = [channel.memory(x, begin, length), channel.mpi.BYTE]
            channel.start(channel.comm.Ibcast, part, src)
        channel.finish()

    def _all_gather(self, outs: Blocks, x: Tensor, alike: int = 0) -> None:
        """MPI passes blocks on among many ranks if they lie behind each other in memory.

        What a rank calls must follow from the sizes alone, which all ranks know: blocks that lie
        apart here, and perhaps nowhere else, are received side by side and copied.
        """
        channel, sizes = self.channel, [out.nbytes for out in outs]
        if sum(sizes) > MAX_BYTES:
            self._all_to_all(outs, [x] * self.size)
            return
        if x.numel() and x.data_ptr() == outs[self.rank].data_ptr():
            x = x.clone()  # MPI wants all ranks, or none, to work in place
        is_apart = not _is_one_stretch(outs)
        joined = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu") if is_apart else None
        first = next((out for out in outs if out.numel()), outs[0]) if joined is None else joined
        places = list(itertools.accumulate(sizes[:-1], initial=0))
        channel.hold(outs)
        received = [channel.memory(first, 0, sum(sizes)), (sizes, places), channel.mpi.BYTE]
        channel.start(channel.comm.Iallgatherv, [channel.memory(x), channel.mpi.BYTE], received)
        channel.finish()
        if joined is not None:
            for out, block in zip(outs, joined.split(sizes), strict=True):
                bytes_of(out).copy_(block)

    def _all_to_all(self, outs: Blocks, ins: Blocks) -> None:
        channel = self.channel
        own, own_out = ins[self.rank], outs[self.rank]
        if own_out.numel() and own_out.data_ptr() != own.data_ptr():
            bytes_of(own_out).copy_(bytes_of(own))
        sent, received = self._addressed(ins), self._addressed(outs)
        channel.start(channel.comm.Ialltoallw, sent, received)
        for kind in (*sent[2], *received[2]):
            if kind != channel.mpi.BYTE:
                kind.Free()  # MPI keeps it until the transfer has ended
        channel.finish()

    def _addressed(self, blocks: Blocks) -> list[Any]:
        """Return blocks as MPI takes them from anywhere: datatypes that hold addresses and lengths.

        The own block is left out.
        """
        channel, mpi = self.channel, self.channel.mpi
        counts, kinds = [0] * self.size, [mpi.BYTE] * self.size
        for peer, block in enumerate(blocks):
            pieces = list(channel.pieces(block.nbytes))
            if pieces and peer != self.rank:
                lengths = [length for _, length in pieces]
                begins = [block.data_ptr() + begin for begin, _ in pieces]
                counts[peer], kinds[peer] = 1, mpi.BYTE.Create_hindexed(lengths, begins).Commit()
        channel.hold(blocks)
        return [mpi.BOTTOM, (counts, [0] * self.size), kinds]

    def _barrier(self) -> None:
        self.channel.barrier()

    def call(
        self, signature: Signature, kernel: Callable[[], Any], **how: Unpack[How]
    ) -> Ticket | None:
        """See `QueuedEngine`; only in threads that may use MPI. Ranks compare their calls first."""
        self.channel.threads.check(signature.verb)

        def compared() -> None:
            if signature.verb != "barrier":
                self._compare(signature)
            kernel()

        return super().call(signature, partial(self.channel.run, compared), **how)

    def _compare(self, signature: Signature) -> None:
        """Raise on all ranks unless their calls fit; MPI itself compares nothing."""
        channel, own = self.channel, signature.packed(self.size)
        everybody = bytearray(len(own) * self.size)
        byte = channel.mpi.BYTE
        channel.start(channel.comm.Iallgather, [own, byte], [everybody, byte])
        channel.finish()
        if everybody != own * self.size:
            heads = [everybody[at : at + len(own)] for at in range(0, len(everybody), len(own))]
            check([Signature.unpacked(head, self.size) for head in heads], self.ranks)

    def prepare(self, name: str) -> None:
        channel = self.channel
        channel.timeout_s = self.timeout_s
        channel.behind = self.jobs.in_background
        channel.watch.doing = name
        channel.watch.number += 1
        self.last_algorithm = "native"

    # -- messages -------------------------------------------------------------------------------

    def exchange(
        self, sends: base.Messages, recvs: base.Messages, tag: int, **how: Unpack[How]
    ) -> Ticket | None:
        """See `Engine`. Not queued behind collectives."""
        ticket = self._post(sends, recvs, tag)
        if not how["async_op"]:
            ticket.wait(how["timeout_s"])
            return None
        self.jobs.wake()
        return ticket

    def receive_any(self, x: Tensor, tag: int) -> SourceTicket:
        ticket = self._post([], [(None, x)], tag)
        self.jobs.wake()
        return ticket

    def _post(
        self, sends: base.Messages, recvs: Sequence[tuple[int | None, Tensor]], tag: int
    ) -> MessageTicket:
        """Start messages; woken, the background thread moves them on while nobody waits."""
        self.check_usable()
        self.channel.threads.check("send or recv")
        post = self.messages.post
        transfers = [post(src, tag, x, is_receive=True) for src, x in recvs]
        transfers += [post(dst, tag, x, is_receive=False) for dst, x in sends]
        self.messages.progress()
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
        return self.channel.waited_ns

    def tell_failure(self, error: BaseException) -> None:
        self.is_broken = True
        self.channel.watch.tell(error, self.culprit(error))

    def cancel(self, why: str) -> None:
        self.channel.watch.cancelled = why

    def release(self) -> None:
        if not self.channel.mpi.Is_finalized():
            self.messages.release()
            self._leave(self)


def _is_one_stretch(blocks: Blocks) -> bool:
    """Whether the blocks lie behind each other in memory."""
    present = [block for block in blocks if block.numel()]
    ends = [block.data_ptr() + block.nbytes for block in present]
    return all(end == block.data_ptr() for end, block in zip(ends, present[1:], strict=False))
