"""The engine of a group whose ranks talk over an MPI communicator.

Everything travels as bytes, from where it lies, so every dtype does. MPI promises no order of
additions: ranks exchange their blocks and add them in rank order themselves.

Messages are posted at once, in any order with collectives. MPI matches them by source and tag, in
the order in which they were posted, and moves them on whenever this process is inside MPI; the
group's thread looks after them while no other does.
"""

from __future__ import annotations

import contextlib
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.distributed import Store

from unisono.comm.arguments import bytes_of
from unisono.comm.engines.base import Blocks, How, Messages, SourceTicket, Ticket
from unisono.comm.engines.mpi.channel import CallQueue, Channel, abandon
from unisono.comm.engines.signature import Signature, check, sign, sign_blocks
from unisono.comm.engines.transport import TransportEngine
from unisono.comm.perform import EXCHANGE_TAG
from unisono.comm.reductions import (
    DTYPE_NUMBERS,
    DTYPES,
    check_op,
    reduce_among,
    reduce_in_rank_order,
)
from unisono.comm.torch.staging import wrong_message
from unisono.errors import CollectiveMismatch, UnisonoError

COPIES_BYTES = 256 * 1024
"""Up to this many bytes over all ranks, every rank fetches all tensors and reduces them itself."""
SMALL_BYTES = 4 * 1024
"""Tensors up to this size are fetched whole by any number of ranks."""
_HEAD = struct.Struct("<3q")
"""What a message tells first: its bytes, dtype and tag."""


@dataclass(slots=True, eq=False)
class Transfer:
    """A message that this rank sends or receives."""

    tensor: Tensor
    peer: int | None
    """The other rank of the group; None until it is known."""
    tag: int
    is_receive: bool
    head: bytearray
    request: Any = None
    """That of MPI; None when it has ended, well or badly."""
    error: BaseException | None = None

    def expected(self) -> bytes:
        """Return the head of the message that belongs here."""
        x = self.tensor
        return _HEAD.pack(x.nbytes, DTYPE_NUMBERS.get(x.dtype, -1), self.tag)


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
        return self._engine.have_ended(self._transfers)

    @property
    def source(self) -> int:
        """Rank of the group that sent the message, once it is done."""
        peer = self._transfers[0].peer
        return -1 if peer is None else peer


class MpiEngine(TransportEngine):
    """Kernels of ranks that share an MPI communicator, run in the group's order of calls.

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
        super().__init__(channel.rank, channel.watch.ranks)
        self.channel = channel
        self.queue = CallQueue(f"unisono-mpi-{name or 'group'}", self._has_messages)
        self.is_broken = False
        """Whether something went wrong, so that transfers may be open for ever."""
        self._store = store  # kept: served by this rank perhaps, and needed until all have left
        self._leave = leave
        self._timeout_s = 600.0
        """Deadline of the collective under way."""
        self._under_way: list[Transfer] = []
        self._moving = threading.Lock()

    # -- collectives ----------------------------------------------------------------------------

    def all_reduce_(self, x: Tensor, op: str, **how: Unpack[How]) -> Ticket | None:
        check_op(op, x.dtype)
        signature = sign("all_reduce", x.dtype, x.nbytes, op=op)
        return self._call(signature, partial(self._all_reduce, x, op), **how)

    def reduce_(self, x: Tensor, dst: int, op: str, **how: Unpack[How]) -> Ticket | None:
        check_op(op, x.dtype)
        signature = sign("reduce", x.dtype, x.nbytes, op=op, root=dst)
        work = x if self.rank == dst else x.clone()
        return self._call(signature, partial(self._all_reduce, work, op), **how)

    def reduce_scatter(
        self, out: Tensor, ins: Blocks, op: str, *, alike: int = 0, **how: Unpack[How]
    ) -> Ticket | None:
        check_op(op, out.dtype)
        lengths = [block.nbytes for block in ins]
        signature = sign("reduce_scatter", out.dtype, sum(lengths), alike, *lengths, op=op)
        return self._call(signature, partial(self._reduce_scatter, out, ins, op), **how)

    def broadcast_(self, x: Tensor, src: int, **how: Unpack[How]) -> Ticket | None:
        signature = sign("broadcast", x.dtype, x.nbytes, root=src)
        return self._call(signature, partial(self._broadcast, x, src), **how)

    def all_gather(
        self, outs: Blocks, x: Tensor, *, alike: int = 0, **how: Unpack[How]
    ) -> Ticket | None:
        lengths = [out.nbytes for out in outs]
        signature = sign("all_gather", x.dtype, sum(lengths), alike, *lengths)
        return self._call(signature, partial(self._all_to_all, outs, [x] * self.size), **how)

    def all_to_all(self, outs: Blocks, ins: Blocks, **how: Unpack[How]) -> Ticket | None:
        return self.swap_blocks("all_to_all", outs, ins, -1, **how)

    def swap_blocks(
        self, verb: str, outs: Blocks, ins: Blocks, root: int, **how: Unpack[How]
    ) -> Ticket | None:
        signature = sign_blocks(verb, outs, ins, root)
        return self._call(signature, partial(self._all_to_all, outs, ins), **how)

    def barrier(self, **how: Unpack[How]) -> Ticket | None:
        def meet() -> None:
            self._finish(self.channel.comm.Ibarrier())

        return self._call(sign("barrier", torch.uint8, 0), meet, **how)

    # -- the kernels: each does the whole of a call, and waits until its deadline ----------------

    def _all_reduce(self, x: Tensor, op: str) -> None:
        if x.numel():
            is_whole = x.nbytes <= SMALL_BYTES or x.nbytes * self.size <= COPIES_BYTES
            swap, place = self._all_to_all, (self.rank, self.size)
            reduce_among(x.view(-1), op, swap, *place, is_whole=is_whole)

    def _reduce_scatter(self, out: Tensor, ins: Blocks, op: str) -> None:
        rows = list(out.new_empty(self.size, out.numel()).unbind())
        self._all_to_all(rows, [block.reshape(-1) for block in ins])
        reduce_in_rank_order(out.view(-1), rows, op)

    def _broadcast(self, x: Tensor, src: int) -> None:
        channel = self.channel
        kind = channel.kind((x.data_ptr(), x.nbytes))
        request = channel.comm.Ibcast([channel.mpi.BOTTOM, 1, kind], src)
        kind.Free()
        self._finish(request, x)

    def _all_to_all(self, outs: Blocks, ins: Blocks) -> None:
        channel, here = self.channel, self.rank
        if outs[here].numel() and outs[here].data_ptr() != ins[here].data_ptr():
            bytes_of(outs[here]).copy_(bytes_of(ins[here]))
        nothing = [0] * self.size
        sides: list[list[Any]] = []
        for blocks in (ins, outs):
            kinds = [
                channel.kind() if q == here else channel.kind((block.data_ptr(), block.nbytes))
                for q, block in enumerate(blocks)
            ]
            sides.append([channel.mpi.BOTTOM, ([1] * self.size, nothing), kinds])
        request = channel.comm.Ialltoallw(*sides)
        for kind in (*sides[0][2], *sides[1][2]):
            kind.Free()
        self._finish(request, *ins, *outs)

    # -- how they are run -------------------------------------------------------------------------

    def _call(
        self, signature: Signature, kernel: Callable[[], Any], **how: Unpack[How]
    ) -> Ticket | None:
        """Run a kernel in the group's order of calls, when ranks have compared what call it is."""
        self.check_usable()  # a closed group has no thread for what comes behind another call
        run = partial(self._run, signature, kernel, how["timeout_s"])
        if how["async_op"]:
            return self.queue.start(run)
        self.queue.run(run)
        return None

    def _run(self, signature: Signature, kernel: Callable[[], Any], timeout_s: float) -> None:
        self.check_usable()
        watch, self._timeout_s = self.channel.watch, timeout_s
        watch.doing = signature.verb
        watch.number += 1
        try:
            with self._translating():
                if signature.verb != "barrier":
                    self._compare(signature)
                kernel()
        except BaseException as error:
            self.fail(error)
            raise

    def _finish(self, request: Any, *tensors: Tensor) -> None:
        """Wait for a transfer of the collective under way; `tensors` live until it has ended."""
        try:
            self.channel.until(request.Test, self._timeout_s, sum(x.nbytes for x in tensors))
        except BaseException:
            abandon(request, tensors)
            raise

    def _compare(self, signature: Signature) -> None:
        """Raise on all ranks unless their calls fit; MPI itself compares nothing."""
        head, byte = signature.packed(self.size), self.channel.mpi.BYTE
        packed = bytearray(len(head) * self.size)
        self._finish(self.channel.comm.Iallgather([head, byte], [packed, byte]))
        if packed != head * self.size:
            heads = [packed[at : at + len(head)] for at in range(0, len(packed), len(head))]
            check([Signature.unpacked(head, self.size) for head in heads], self.ranks)

    @contextlib.contextmanager
    def _translating(self) -> Iterator[None]:
        try:
            yield
        except self.channel.mpi.Exception as error:
            raise self.channel.translated(error) from error

    # -- messages -------------------------------------------------------------------------------

    def exchange(
        self, sends: Messages, recvs: Messages, tag: int, **how: Unpack[How]
    ) -> Ticket | None:
        """See `Engine`. Not queued behind collectives."""
        ticket = self._post(sends, recvs, tag)
        if how["async_op"]:
            self.queue.wake()
            return ticket
        ticket.wait(how["timeout_s"])
        return None

    def receive_any(self, x: Tensor, tag: int) -> SourceTicket:
        ticket = self._post([], [(None, x)], tag)
        self.queue.wake()
        return ticket

    def _post(
        self, sends: Messages, recvs: Sequence[tuple[int | None, Tensor]], tag: int
    ) -> MessageTicket:
        self.check_usable()
        transfers = [Transfer(x, src, tag, True, bytearray(_HEAD.size)) for src, x in recvs]
        for dst, x in sends:
            transfer = Transfer(x, dst, tag, False, bytearray())
            transfer.head = bytearray(transfer.expected())
            transfers.append(transfer)
        channel, mpi = self.channel, self.channel.mpi
        with self._moving, self._translating():
            for transfer in transfers:
                x, head = transfer.tensor, transfer.head
                kind = channel.kind((mpi.Get_address(head), len(head)), (x.data_ptr(), x.nbytes))
                start = channel.comm.Irecv if transfer.is_receive else channel.comm.Isend
                other = mpi.ANY_SOURCE if transfer.peer is None else transfer.peer
                # Larger tags than MPI knows are folded: messages tell their own.
                folded = channel.tags if tag == EXCHANGE_TAG else tag % channel.tags
                transfer.request = start([mpi.BOTTOM, 1, kind], other, folded)
                kind.Free()
                self._under_way.append(transfer)
        self.have_ended(transfers)
        return MessageTicket(self, transfers)

    def have_ended(self, transfers: Sequence[Transfer]) -> bool:
        """Let messages move on; return whether these have ended."""
        with self._moving:
            for transfer in self._under_way:
                self._advance(transfer)
            self._under_way = [t for t in self._under_way if t.request is not None]
        return all(transfer.request is None for transfer in transfers)

    def _has_messages(self) -> bool:
        """Let messages move on while no thread waits; return whether some are under way."""
        self.have_ended(())
        return self.cause is None and bool(self._under_way)

    def _advance(self, transfer: Transfer) -> None:
        mpi = self.channel.mpi
        status = mpi.Status()
        try:
            if not transfer.request.Test(status):
                return
        except mpi.Exception as error:
            is_long = error.Get_error_class() == mpi.ERR_TRUNCATE and transfer.peer is not None
            transfer.error = (
                self._wrong(transfer, None) if is_long else self.channel.translated(error)
            )
        else:
            if transfer.is_receive:
                transfer.peer = status.Get_source()
                is_whole = status.Get_elements(mpi.BYTE) == _HEAD.size + transfer.tensor.nbytes
                if not is_whole or transfer.head != transfer.expected():
                    transfer.error = self._wrong(transfer, *_HEAD.unpack(transfer.head))
        transfer.request = None

    def _wrong(
        self, transfer: Transfer, nbytes: int | None, number: int = -1, tag: int | None = None
    ) -> UnisonoError:
        """Return the error for a message of another length, dtype or tag; see `wrong_message`."""
        sender = -1 if transfer.peer is None else self.ranks[transfer.peer]
        if tag is not None and tag != transfer.tag:
            limit = self.channel.tags
            return CollectiveMismatch.because(
                f"a receive with tag {transfer.tag} from rank {sender}",
                f"a message with tag {tag}, which this MPI cannot tell from it",
                f"it has {limit} tags: {tag} % {limit} = {transfer.tag} % {limit}",
                f"tags below {limit}",
            )
        sent = DTYPES[number] if 0 <= number < len(DTYPES) else None
        return wrong_message(transfer.tensor, sender, nbytes, transfer.tag, sent)

    def finish_messages(self, transfers: Sequence[Transfer], timeout_s: float) -> None:
        """Wait for messages of this rank."""
        is_over = partial(self.have_ended, transfers)
        try:
            if not is_over():
                self.check_usable()
                self.channel.watch.doing = "send or recv"
                peers = sorted({t.peer for t in transfers if t.request and t.peer is not None})
                nbytes = sum(transfer.tensor.nbytes for transfer in transfers)
                self.channel.until(is_over, timeout_s, nbytes, peers)
            for transfer in transfers:
                if transfer.error is not None:
                    raise transfer.error
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

    def finish_started(self, timeout_s: float) -> bool:
        return self.queue.close(timeout_s)

    def release(self) -> None:
        """See `TransportEngine`. What is not received yet never will be."""
        if self.channel.mpi.Is_finalized():
            return
        with self._moving:
            for transfer in self._under_way:
                # What cannot be cancelled stays as it is, and so does its memory.
                with contextlib.suppress(self.channel.mpi.Exception):
                    if transfer.is_receive:
                        transfer.request.Cancel()
                        transfer.request.Test()
            abandon(self._under_way)
            self._under_way = []
        self._leave(self)
