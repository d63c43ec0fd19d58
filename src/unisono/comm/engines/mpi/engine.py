"""The engine of a group whose ranks talk over an MPI communicator.

What only moves travels as bytes, so every dtype does, from where it lies. MPI promises no order of
additions. Where its order could show in the bits of a sum, ranks exchange their blocks and add them
in rank order themselves; elsewhere its own all-reduce serves.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.distributed import Store

from unisono.comm.arguments import bytes_of
from unisono.comm.engines import base
from unisono.comm.engines.algorithms import forced_algorithms
from unisono.comm.engines.base import Blocks, How, SourceTicket, Ticket
from unisono.comm.engines.mpi.channel import MAX_BYTES, Channel
from unisono.comm.engines.mpi.messages import MessageQueue, MpiTransfer
from unisono.comm.engines.mpi.queue import Job, JobQueue
from unisono.comm.engines.signature import Signature, check, sign, sign_blocks
from unisono.comm.engines.transport import TransportEngine
from unisono.comm.reductions import (
    BOOL_OPS,
    accumulation_dtype,
    check_op,
    reduce_among,
    reduce_in_rank_order,
)

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


class MpiMessageTicket:
    """Messages under way, as the verbs see them."""

    def __init__(self, engine: MpiEngine, transfers: Sequence[MpiTransfer]) -> None:
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
        self.jobs = jobs = JobQueue(
            f"unisono-mpi-{name or 'group'}", has_thread=channel.threads.has_background
        )
        self.channel = channel
        self.messages = MessageQueue(channel)
        self._store = store  # kept: served by this rank perhaps, and wanted until all have left
        self.is_broken = False
        """Whether something went wrong, so that transfers may be open for ever."""
        self._leave = leave
        jobs.chore = lambda: self.cause is None and self.messages.progress()

    # -- collectives ----------------------------------------------------------------------------

    def all_reduce_(self, x: Tensor, op: str, **how: Unpack[How]) -> Ticket | None:
        check_op(op, x.dtype)
        signature = sign("all_reduce", x.dtype, x.nbytes, op=op)
        return self.call(signature, partial(self._all_reduce, x, op), **how)

    def reduce_(self, x: Tensor, dst: int, op: str, **how: Unpack[How]) -> Ticket | None:
        check_op(op, x.dtype)
        signature = sign("reduce", x.dtype, x.nbytes, op=op, root=dst)
        work = x if self.rank == dst else x.clone()
        return self.call(signature, partial(self._all_reduce, work, op), **how)

    def reduce_scatter(
        self, out: Tensor, ins: Blocks, op: str, *, alike: int = 0, **how: Unpack[How]
    ) -> Ticket | None:
        check_op(op, out.dtype)
        lengths = [block.nbytes for block in ins]
        signature = sign("reduce_scatter", out.dtype, sum(lengths), alike, *lengths, op=op)
        return self.call(signature, partial(self._reduce_scatter, out, ins, op), **how)

    def broadcast_(self, x: Tensor, src: int, **how: Unpack[How]) -> Ticket | None:
        signature = sign("broadcast", x.dtype, x.nbytes, root=src)
        return self.call(signature, partial(self._broadcast, x, src), **how)

    def all_gather(
        self, outs: Blocks, x: Tensor, *, alike: int = 0, **how: Unpack[How]
    ) -> Ticket | None:
        lengths = [out.nbytes for out in outs]
        signature = sign("all_gather", x.dtype, sum(lengths), alike, *lengths)
        return self.call(signature, partial(self._all_gather, outs, x), **how)

    def all_to_all(self, outs: Blocks, ins: Blocks, **how: Unpack[How]) -> Ticket | None:
        return self.swap_blocks("all_to_all", outs, ins, -1, **how)

    def swap_blocks(
        self, verb: str, outs: Blocks, ins: Blocks, root: int, **how: Unpack[How]
    ) -> Ticket | None:
        signature = sign_blocks(verb, outs, ins, root)
        return self.call(signature, partial(self._all_to_all, outs, ins), **how)

    def barrier(self, **how: Unpack[How]) -> Ticket | None:
        return self.call(sign("barrier", torch.uint8, 0), self.channel.barrier, **how)

    # -- the kernels: each does the whole of a call, and waits until its deadline ----------------

    def _all_reduce(self, x: Tensor, op: str) -> None:
        forced = forced_algorithms().get("all_reduce")
        is_float = x.dtype.is_floating_point or x.dtype.is_complex
        is_exact = not is_float or (
            self.size == 2 and x.dtype.itemsize >= 4 and op in ("sum", "mean")
        )
        if not x.numel() or (forced != "native" and (forced is not None or not is_exact)):
            self._reduce_here(x, op, forced)
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

    def _reduce_here(self, x: Tensor, op: str, forced: str | None) -> None:
        """Exchange blocks and reduce them in rank order, so that all ranks get the same bits."""
        is_small = x.nbytes <= SMALL_BYTES or x.nbytes * self.size <= COPIES_BYTES
        is_whole = is_small if forced is None else forced == "all_to_all"
        self.last_algorithm = "all_to_all" if is_whole else "scatter_gather"
        if x.numel():
            swap, place = self._all_to_all, (self.rank, self.size)
            reduce_among(x.view(-1), op, swap, *place, is_whole=is_whole)

    def _reduce_scatter(self, out: Tensor, ins: Blocks, op: str) -> None:
        self.last_algorithm = "all_to_all"
        rows = list(out.new_empty(self.size, out.numel()).unbind())
        self._all_to_all(rows, [block.reshape(-1) for block in ins])
        reduce_in_rank_order(out.view(-1), rows, op)

    def _broadcast(self, x: Tensor, src: int) -> None:
        channel = self.channel
        for begin, length in channel.pieces(x.nbytes):
            part = [channel.memory(x, begin, length), channel.mpi.BYTE]
            channel.start(channel.comm.Ibcast, part, src)
        channel.finish()

    def _all_gather(self, outs: Blocks, x: Tensor) -> None:
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
        block, out = ins[self.rank], outs[self.rank]
        if out.numel() and out.data_ptr() != block.data_ptr():
            bytes_of(out).copy_(bytes_of(block))
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

    # -- how they are run -------------------------------------------------------------------------

    def call(
        self, signature: Signature, kernel: Callable[[], Any], **how: Unpack[How]
    ) -> Ticket | None:
        """Run a kernel in the group's order of calls; `signature` says what call it is.

        Only in threads that may use MPI. Ranks compare their calls first.
        """
        self.channel.threads.check(signature.verb)
        run = partial(self._run, signature, kernel, how["timeout_s"])
        if how["async_op"]:
            self.check_usable()
            job = Job(self.jobs, run)
            self.jobs.post(job)
            return job
        self.jobs.run(run)
        return None

    def _run(self, signature: Signature, kernel: Callable[[], Any], timeout_s: float) -> None:
        self.check_usable()
        channel = self.channel
        channel.timeout_s = timeout_s
        channel.behind = self.jobs.in_background
        channel.watch.doing = signature.verb
        channel.watch.number += 1
        self.last_algorithm = "native"

        def compared() -> None:
            if signature.verb != "barrier":
                self._compare(signature)
            kernel()

        try:
            channel.run(compared)
        except BaseException as error:
            self.fail(error)
            raise

    def _compare(self, signature: Signature) -> None:
        """Raise on all ranks unless their calls fit; MPI itself compares nothing."""
        channel, head = self.channel, signature.packed(self.size)
        packed = bytearray(len(head) * self.size)
        byte = channel.mpi.BYTE
        channel.start(channel.comm.Iallgather, [head, byte], [packed, byte])
        channel.finish()
        if packed != head * self.size:
            heads = [packed[at : at + len(head)] for at in range(0, len(packed), len(head))]
            check([Signature.unpacked(head, self.size) for head in heads], self.ranks)

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
    ) -> MpiMessageTicket:
        """Start messages; woken, the background thread moves them on while no thread waits."""
        self.check_usable()
        self.channel.threads.check("send or recv")
        post = self.messages.post
        transfers = [post(src, tag, x, is_receive=True) for src, x in recvs]
        transfers += [post(dst, tag, x, is_receive=False) for dst, x in sends]
        self.messages.progress()
        return MpiMessageTicket(self, transfers)

    def finish_messages(self, transfers: Sequence[MpiTransfer], timeout_s: float) -> None:
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

    def abandon_after_fork(self) -> None:
        super().abandon_after_fork()
        self.jobs.forget()

    def finish_started(self, timeout_s: float) -> bool:
        return self.jobs.close(timeout_s)

    def release(self) -> None:
        if not self.channel.mpi.Is_finalized():
            self.messages.release()
            self._leave(self)


def _is_one_stretch(blocks: Blocks) -> bool:
    """Whether the blocks lie behind each other in memory."""
    present = [block for block in blocks if block.numel()]
    ends = [block.data_ptr() + block.nbytes for block in present]
    return all(end == block.data_ptr() for end, block in zip(ends, present[1:], strict=False))
