"""The kernels over torch.distributed's own backends for host memory (gloo).

Tensors travel as bytes where they are only moved, so every dtype works; reductions a backend does
not know are done in a wider dtype or locally, in rank order. A small collective costs its
latencies, so its data travels along with the signatures that ranks compare.
"""

from __future__ import annotations

import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.comm.arguments import bytes_of
from unisono.comm.engines.base import Blocks, Engine, How, Messages, SourceTicket, Ticket
from unisono.comm.engines.signature import (
    Compared,
    Signature,
    check,
    packed_bytes,
    sign,
    sign_blocks,
)
from unisono.comm.health.deadlock import obstacle_to
from unisono.comm.health.failures import Meaning, meaning_of
from unisono.comm.reductions import (
    BOOL_OPS,
    DTYPE_NUMBERS,
    DTYPES,
    accumulation_dtype,
    reduce_in_rank_order,
)
from unisono.comm.torch.staging import wrong_message
from unisono.errors import CollectiveMismatch, UnisonoError
from unisono.torch_private import known_groups

_SMALL_BYTES = 64 * 1024
"""Up to this many bytes in all, a collective is latency."""
_MAX_PAIRWISE_RANKS = 8
"""Above this many ranks, small data for every peer costs more than a ring."""
_SLICE_S = 0.5
"""A blocked rank looks this often whether its wait can still end."""

NATIVE_OPS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "sum64": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "and": dist.ReduceOp.BAND,
    "or": dist.ReduceOp.BOR,
    "xor": dist.ReduceOp.BXOR,
}
_HEAD = struct.Struct("<4q")
"""What a message tells first: that it is one, its bytes, their dtype, the tag of a large one."""
_MESSAGE = 0x756E69736F6E6F
_BODY_TAG = 1 << 30
"""Large messages have tags from here on: each one its own, so that it finds its place."""
_WIDENED: dict[torch.dtype, torch.dtype] = {torch.int16: torch.int32, torch.bool: torch.uint8}


class TorchTicket:
    """Works of torch.distributed, and what to do on this rank when they are complete.

    Args:
        works: what torch gave for them.
        finish: called once, when all are complete.
        keep: lives as long as the ticket.
        first: is waited for before them.
    """

    def __init__(
        self,
        works: Sequence[dist.Work | None],
        finish: Callable[[], object] | None = None,
        *,
        keep: object = None,
        first: TorchTicket | None = None,
    ) -> None:
        self._works = [work for work in works if work is not None]
        self._finish = [] if finish is None else [finish]
        self._keep = keep
        self._first = first

    def wait(self, timeout_s: float) -> None:
        """Wait for all works; raise `TimeoutError` at the deadline, `RankFailed` on a failure."""
        deadline = time.monotonic() + timeout_s
        if self._first is not None:
            self._first.wait(timeout_s)
        while self._works:
            self._wait_one(self._works[0], deadline)
            self._works.pop(0)
        while self._finish:
            self._finish.pop(0)()

    def done(self) -> bool:
        """Whether every work is complete."""
        is_told = self._first is None or self._first.done()
        return is_told and all(work.is_completed() for work in self._works)

    def then(self, finish: Callable[[], object]) -> TorchTicket:
        """Call `finish` too, when all works are complete."""
        self._finish.append(finish)
        return self

    def _wait_one(self, work: dist.Work, deadline: float) -> None:
        while (remaining_s := deadline - time.monotonic()) > 0:
            try:
                work.wait(timedelta(seconds=max(min(remaining_s, _SLICE_S), 0.001)))
                return
            except RuntimeError as error:
                meaning = meaning_of(error)
                if meaning is Meaning.LATE:
                    raise TimeoutError(str(error)) from None
                if meaning is not Meaning.NOT_YET:
                    raise
            reason = obstacle_to()
            if reason is not None:
                raise reason
        raise TimeoutError


class Arrival:
    """A message that is to fill `x`: its first part tells what it is, and holds a small one.

    The room for that part does not depend on `x`: gloo accepts a message that is too short, and
    ends the process at one that is too long. So what follows is received when its length is known.

    Args:
        group: the process group.
        x: what it is to fill.
        src: its sender; None for any.
        tag: its tag.
    """

    def __init__(self, group: dist.ProcessGroup, x: Tensor, src: int | None, tag: int) -> None:
        self._group, self._x, self._src, self._tag = group, x, src, tag
        self.is_large = x.nbytes > _SMALL_BYTES
        self._frame = torch.empty(_HEAD.size + _SMALL_BYTES, dtype=torch.uint8, device="cpu")
        room = [self._frame]
        self._first = group.recv_anysource(room, tag) if src is None else group.recv(room, src, tag)
        self._refusal: UnisonoError | None = None

    def wait(self, *timeout: timedelta) -> None:
        """Receive all of the message."""
        self._first.wait(*timeout)
        x, src = self._x, self._source_rank()
        head = self._frame[: _HEAD.size].numpy().tobytes()
        magic, nbytes, number, body_tag = _HEAD.unpack(head)
        if magic != _MESSAGE:  # sent by something else than a communicator
            self._refusal = wrong_message(x, src, None, self._tag)
            return
        if (nbytes, number) != (x.nbytes, DTYPE_NUMBERS[x.dtype]):
            self._refusal = wrong_message(x, src, nbytes, self._tag, DTYPES[number])
        if nbytes > _SMALL_BYTES:
            is_right = self._refusal is None
            body = bytes_of(x) if is_right else torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            self._group.recv([body], src, body_tag).wait(*timeout)

    def place(self) -> None:
        """Write a small message to its place; raise if it is not what was expected."""
        if self._refusal is not None:
            raise self._refusal
        if not self.is_large:
            bytes_of(self._x).copy_(self._frame[_HEAD.size :][: self._x.nbytes])

    def _source_rank(self) -> int:
        return self._first._source_rank() if self._src is None else self._src


class GlooMessageTicket:
    """Messages of gloo under way.

    gloo cannot be asked whether a message is complete, closes its connections when a wait for one
    runs out, and forgets a message whose handle is gone. So each is waited for once: by
    `wait`, or by a thread after `done` or after the handle was dropped.

    Args:
        works: what gloo gave for them.
        timeout_s: deadline if `done` is called before `wait`; None: the group's.
        arrivals: those of them that are received.
    """

    def __init__(
        self,
        works: Sequence[Any],
        timeout_s: float | None = None,
        arrivals: Sequence[Arrival] = (),
    ) -> None:
        self._arrivals = arrivals
        self._works = list(works)
        self._first = next(iter(self._works), None)
        self._timeout_s = timeout_s
        self._is_attended = False
        self._waiter: Future[None] | None = None

    def wait(self, timeout_s: float) -> None:
        """Wait for all messages; raise `TimeoutError` at the deadline."""
        self._is_attended = True
        if self._waiter is None:
            _wait_for(self._works, timeout_s)
        else:
            self._waiter.result(timeout_s)
        for arrival in self._arrivals:
            arrival.place()

    def done(self) -> bool:
        """Whether `wait` would return (or raise) at once."""
        if not self._works:
            return True
        if self._waiter is None:
            self._waiter = _wait_in_thread(self._works, self._timeout_s)
        return self._waiter.done()

    @property
    def source(self) -> int:
        """Rank that sent the message, once a receive from any rank is done."""
        return -1 if self._first is None else self._first._source_rank()

    def __del__(self) -> None:
        """Let messages arrive that were never waited for."""
        is_alone = self._works and not self._is_attended and self._waiter is None
        if is_alone and not sys.is_finalizing():
            _wait_in_thread(self._works, None)


def _wait_in_thread(works: list[dist.Work], timeout_s: float | None) -> Future[None]:
    """Wait for messages in the place of their owner, in a thread that ends with them."""
    waiter: Future[None] = Future()

    def run() -> None:
        try:
            waiter.set_result(_wait_for(works, timeout_s))
        except Exception as error:  # raised where the owner waits, if it ever does
            waiter.set_exception(error)

    threading.Thread(target=run, name="unisono-messages", daemon=True).start()
    return waiter


def _wait_for(works: list[dist.Work], timeout_s: float | None) -> None:
    """Wait for all, each taken from the list when it is complete; None: the group's deadline."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while works:
        try:
            if deadline is None:
                works[0].wait()
            else:
                works[0].wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        except RuntimeError as error:
            if meaning_of(error) in (Meaning.LATE, Meaning.NOT_YET):
                raise TimeoutError(str(error)) from None
            raise
        works.pop(0)


class TorchEngine(Engine):
    """Kernels of one torch.distributed group.

    Args:
        group: the process group.
        backend: name of its backend for the device in use.
    """

    def __init__(self, group: dist.ProcessGroup, backend: str) -> None:
        self.group = group
        self.rank = group.rank()
        self.size = group.size()
        self.backend = backend
        self._places = range(self.size)
        self._others = [q for q in self._places if q != self.rank]
        self._bodies = 0
        self._compared = Compared()
        is_pairwise = backend == "gloo" and 1 < self.size <= _MAX_PAIRWISE_RANKS
        self._along_bytes = _SMALL_BYTES if is_pairwise else 0
        room = packed_bytes(self.size) + self._along_bytes
        self._rooms = [0 if q == self.rank else room for q in self._places]

    def all_reduce_(self, x: Tensor, op: str, **how: Unpack[How]) -> Ticket | None:
        signature = sign("all_reduce", x.dtype, x.nbytes, op=op)
        if self._travels_along(x.nbytes) or (op == "product" and x.dtype.is_complex):
            return self._reduced_here(signature, x, [x] * self.size, op, **how)
        comparison = self._agree(signature, how["timeout_s"])
        options = dist.AllreduceOptions()
        return self._native_reduce(x, op, options, self.group.allreduce, comparison)

    def reduce_(self, x: Tensor, dst: int, op: str, **how: Unpack[How]) -> Ticket | None:
        signature = sign("reduce", x.dtype, x.nbytes, op=op, root=dst)
        if self._travels_along(x.nbytes):
            blocks = [x if peer == dst else x.view(-1)[:0] for peer in range(self.size)]
            if self.rank != dst:
                return self._tell(signature, blocks)
            return self._reduced_here(signature, x, blocks, op, **how)
        if op == "product" and x.dtype.is_complex:
            return super().reduce_(x, dst, op, **how)
        options = dist.ReduceOptions()
        options.rootRank = dst
        comparison = self._agree(signature, how["timeout_s"])
        return self._native_reduce(x, op, options, self.group.reduce, comparison)

    def broadcast_(self, x: Tensor, src: int, **how: Unpack[How]) -> Ticket | None:
        signature, nothing = sign("broadcast", x.dtype, x.nbytes, root=src), x.view(-1)[:0]
        if self._travels_along(x.nbytes):
            ins = [x if self.rank == src else nothing] * self.size
            outs = [x if q == src else nothing for q in self._places]
            return self._told_blocks(signature, outs, ins)
        comparison = self._agree(signature, how["timeout_s"])
        return TorchTicket(
            [spread(self.group, bytes_of(x), src)] if x.numel() else [], first=comparison
        )

    def all_gather(
        self, outs: Blocks, x: Tensor, *, alike: int = 0, **how: Unpack[How]
    ) -> Ticket | None:
        lengths = [out.numel() for out in outs]
        total = sum(lengths) * x.element_size()
        signature = sign("all_gather", x.dtype, total, alike, *lengths)
        if self._travels_along(total):
            return self._told_blocks(signature, outs, [x] * self.size)
        comparison = self._agree(signature, how["timeout_s"])
        self.last_algorithm = "broadcasts"
        outs[self.rank].copy_(x)
        works = [spread(self.group, bytes_of(out), q) for q, out in enumerate(outs) if out.numel()]
        return TorchTicket(works, first=comparison)

    def reduce_scatter(
        self, out: Tensor, ins: Blocks, op: str, *, alike: int = 0, **how: Unpack[How]
    ) -> Ticket | None:
        lengths = [block.numel() for block in ins]
        total = sum(lengths) * out.element_size()
        signature = sign("reduce_scatter", out.dtype, total, alike, *lengths, op=op)
        return self._reduced_here(signature, out, ins, op, **how)

    def all_to_all(self, outs: Blocks, ins: Blocks, **how: Unpack[How]) -> TorchTicket:
        return self.swap_blocks("all_to_all", outs, ins, -1, **how)

    def swap_blocks(
        self, verb: str, outs: Blocks, ins: Blocks, root: int, **how: Unpack[How]
    ) -> TorchTicket:
        signature = sign_blocks(verb, outs, ins, root)
        return self._swap(outs, ins, self._agree(signature, how["timeout_s"]))

    def _swap(
        self, outs: Blocks, ins: Blocks, comparison: TorchTicket | None = None
    ) -> TorchTicket:
        self.last_algorithm = "all_to_all"
        work, kept, unpack = swap_flat(self.group, outs, ins)
        return TorchTicket([work], unpack, keep=kept, first=comparison)

    # -- signatures of calls: gloo compares nothing -----------------------------

    def _travels_along(self, nbytes: int) -> bool:
        """Whether blocks of `nbytes` in all travel along with the signature."""
        return self._along_bytes > 0 and nbytes <= self._along_bytes

    def _tell(
        self,
        signature: Signature,
        ins: Blocks = (),
        place: Callable[[Callable[[int], memoryview]], None] | None = None,
    ) -> TorchTicket:
        """Send the signature to all ranks, and compare theirs; small blocks travel along.

        All ranks have the same room for a signature, whatever they expect: gloo accepts a
        message that is too short, and ends the process at one that is too long.

        Args:
            signature: of the call.
            ins: a block for each rank.
            place: called with a function that returns what another rank has sent along.
        """
        if self.backend != "gloo" or self.size == 1:
            return TorchTicket([])
        head, others = signature.packed(self.size), self._others
        blocks = [_memory(ins[q]) for q in others] if ins else [b""] * len(others)
        send = bytearray().join([part for block in blocks for part in (head, block)])
        sent = [len(head) + len(block) for block in blocks]
        sent.insert(self.rank, 0)
        room = self._rooms[others[0]]
        recv = torch.empty(room * len(others), dtype=torch.uint8, device="cpu")
        payload = torch.frombuffer(send, dtype=torch.uint8)
        work = self.group.alltoall_base(recv, payload, self._rooms, sent, dist.AllToAllOptions())
        self.last_algorithm = "with the signature"

        def compare() -> None:
            received = _memory(recv)
            heads = [received[at : at + len(head)] for at in range(0, len(recv), room)]
            if any(other != head for other in heads):
                self._check([head if q == self.rank else heads.pop(0) for q in self._places])
            if place is not None:
                place(lambda q: received[(q - (q > self.rank)) * room + len(head) :])

        return TorchTicket([work], compare, keep=payload)

    def _check(self, heads: Sequence[bytes | memoryview]) -> None:
        """Raise if what ranks have told does not fit; breaks the group."""
        is_known = self.group in known_groups
        ranks = dist.get_process_group_ranks(self.group) if is_known else self._places
        try:
            check([Signature.unpacked(head, self.size) for head in heads], ranks)
        except CollectiveMismatch as error:
            self.cause = error  # ranks are at different places in the order of calls
            raise

    def _told_blocks(self, signature: Signature, outs: Blocks, ins: Blocks) -> TorchTicket:
        """Exchange small blocks that travel along with the signature."""

        def place(block_of: Callable[[int], memoryview]) -> None:
            for q, out in enumerate(outs):
                if out.numel():
                    block = ins[q] if q == self.rank else _shown(block_of(q), out)
                    out.view(-1).copy_(block.view(-1))

        return self._tell(signature, ins, place)

    def _agree(self, signature: Signature, timeout_s: float) -> TorchTicket:
        """Send the signature of a call whose data travels separately, at the same time.

        Where this call did not follow the latest one before, it is compared first: data of
        another length than expected would end the process.
        """
        ticket = self._tell(signature)
        if self._compared.is_new(signature):
            ticket.wait(timeout_s)
        return ticket

    def _reduced_here(
        self, signature: Signature, out: Tensor, ins: Blocks, op: str, **how: Unpack[How]
    ) -> TorchTicket:
        """Fill `out` with the reduction of what ranks have for this one, in their order."""
        if not self._travels_along(signature.nbytes):
            blocks = list(out.new_empty((self.size, *out.shape)).unbind())
            ticket = self._swap(blocks, ins, self._agree(signature, how["timeout_s"]))
            return ticket.then(partial(reduce_in_rank_order, out, blocks, op))

        def place(block_of: Callable[[int], memoryview]) -> None:
            block_here = ins[self.rank].view(-1)
            if self.rank and out.numel():  # `out` may be the same tensor, and is written first
                block_here = block_here.clone()
            blocks = [
                block_here if q == self.rank else _shown(block_of(q), out) for q in self._places
            ]
            reduce_in_rank_order(out.view(-1), blocks, op)

        return self._tell(signature, ins, place)

    # -- messages: each tells what it is ----------------------------------------------------------

    def exchange(
        self, sends: Messages, recvs: Messages, tag: int, **how: Unpack[How]
    ) -> Ticket | None:
        arrivals = [Arrival(self.group, x, src, tag) for src, x in recvs]
        works: list[Any] = [*arrivals]
        for dst, x in sends:
            works += self._depart(x, dst, tag)
        ticket = GlooMessageTicket(works, how["timeout_s"], arrivals)
        if how["async_op"] and any(arrival.is_large for arrival in arrivals):
            ticket.done()  # a thread takes what follows the first part
        return ticket

    def _depart(self, x: Tensor, dst: int, tag: int) -> list[dist.Work]:
        """Send a message as an `Arrival` takes it."""
        block, is_large = bytes_of(x), x.nbytes > _SMALL_BYTES
        self._bodies = (self._bodies + is_large) % _BODY_TAG
        body_tag = _BODY_TAG + self._bodies
        head = bytearray(_HEAD.pack(_MESSAGE, x.nbytes, DTYPE_NUMBERS[x.dtype], body_tag))
        first = torch.frombuffer(head, dtype=torch.uint8)
        if not is_large:
            return [self.group.send([torch.cat([first, block])], dst, tag)]
        return [self.group.send([first], dst, tag), self.group.send([block], dst, body_tag)]

    def receive_any(self, x: Tensor, tag: int) -> SourceTicket:
        arrival = Arrival(self.group, x, None, tag)
        return GlooMessageTicket([arrival], None, [arrival])

    def barrier(self, **how: Unpack[How]) -> Ticket | None:
        options = dist.BarrierOptions()
        options.device = torch.device("cpu")  # else that of an accelerator which the group serves
        return TorchTicket([self.group.barrier(options)])

    def _native_reduce(
        self,
        x: Tensor,
        op: str,
        options: Any,
        start: Callable[[list[Tensor], Any], dist.Work],
        comparison: TorchTicket,
    ) -> TorchTicket:
        """Let the backend reduce, in a dtype that it knows and that rounds once."""
        self.last_algorithm = "native"
        wide = accumulation_dtype(x.dtype, op)
        dtype = wide if wide != x.dtype else _WIDENED.get(x.dtype, x.dtype)
        options.reduceOp = NATIVE_OPS[BOOL_OPS.get(op, op) if x.dtype == torch.bool else op]
        work = x if dtype == x.dtype else x.to(dtype)
        plain = torch.view_as_real(work) if x.is_complex() else work
        ticket = TorchTicket([start([plain], options)], first=comparison)
        if op == "mean":
            ticket.then(partial(work.div_, self.size))
        return ticket if work is x else ticket.then(partial(x.copy_, work))


def _memory(x: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor."""
    array: Any = bytes_of(x).numpy()
    return memoryview(array)


def _shown(memory: memoryview, like: Tensor) -> Tensor:
    """Return a flat tensor over the beginning of some memory, with the elements of another."""
    if not like.numel():
        return like.view(-1)
    return torch.frombuffer(memory, dtype=like.dtype, count=like.numel())


def spread(group: dist.ProcessGroup, block: Tensor, src: int) -> dist.Work:
    """Broadcast a block of rank `src` over a group of torch's."""
    options = dist.BroadcastOptions()
    options.rootRank = src
    return group.broadcast([block], options)


def swap_flat(
    group: dist.ProcessGroup, outs: Blocks, ins: Blocks
) -> tuple[dist.Work, list[Tensor], Callable[[], None]]:
    """Exchange blocks in one flat transfer of bytes over a group of torch's, any sizes.

    Returns the work, the memory that it needs, and what is left to do when it is complete.
    """
    send, target = one_block(ins), one_block(outs)
    if send is None:
        send = torch.cat([bytes_of(block) for block in ins])
    received, sent = [out.nbytes for out in outs], [block.nbytes for block in ins]
    recv = send.new_empty(sum(received)) if target is None else target
    work = group.alltoall_base(recv, send, received, sent, dist.AllToAllOptions())

    def unpack() -> None:
        if target is None:
            for out, block in zip(outs, recv.split(received), strict=True):
                bytes_of(out).copy_(block)

    return work, [recv, send], unpack


def one_block(blocks: Blocks) -> Tensor | None:
    """Return one flat byte view over `blocks` if they follow each other in one storage."""
    first = next((b for b in blocks if b.numel()), None)
    if first is None:
        return None
    storage = first.untyped_storage().data_ptr()
    begin = end = first.data_ptr()
    for block in blocks:
        if block.numel() == 0:
            continue
        if block.data_ptr() != end or block.untyped_storage().data_ptr() != storage:
            return None
        end += block.nbytes
    whole = torch.empty(0, dtype=torch.uint8, device=first.device)
    return whole.set_(first.untyped_storage(), begin - storage, (end - begin,), (1,))
