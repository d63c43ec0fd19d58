"""The kernels over torch.distributed's own backends for host memory (gloo).

Tensors travel as bytes where they are only moved, so every dtype works; reductions a backend does
not know are done in a wider dtype or locally, in rank order. The chooser picks the algorithm.
"""

from __future__ import annotations

import secrets
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

from unisono.comm import call as calls
from unisono.comm.arguments import bytes_of
from unisono.comm.engines.algorithms import SMALL_BYTES, choose
from unisono.comm.engines.base import Blocks, Engine, How, Messages, SourceTicket, Ticket
from unisono.comm.health.deadlock import hopeless
from unisono.comm.health.failures import Meaning, meaning_of
from unisono.comm.reductions import (
    BOOL_OPS,
    DTYPE_NUMBERS,
    DTYPES,
    accumulation_dtype,
    reduce_among,
    reduce_in_rank_order,
)
from unisono.comm.torch.staging import wrong_message
from unisono.errors import CollectiveMismatch, UnisonoError

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
_HEAD = struct.Struct("<2q")
"""What a broadcast tells first: how many bytes there are, and the number of their dtype."""
_UNWRITTEN = torch.tensor(list(secrets.token_bytes(8)), dtype=torch.uint8, device="cpu")
"""Stands at the end of what is to be received: gloo takes a short message for the whole one. (Of
fewer bytes than these nothing can be said.)"""
_WIDENED: dict[torch.dtype, torch.dtype] = {torch.int16: torch.int32, torch.bool: torch.uint8}


class TorchTicket:
    """Works of torch.distributed, and what to do on this rank when they are complete.

    Args:
        works: what torch gave for them.
        finish: called once, when all are complete.
        keep: lives as long as the ticket.
    """

    def __init__(
        self,
        works: Sequence[dist.Work | None],
        finish: Callable[[], object] | None = None,
        *,
        keep: Tensor | None = None,
    ) -> None:
        self._works = [work for work in works if work is not None]
        self._finish = [] if finish is None else [finish]
        self._keep = keep

    def wait(self, timeout_s: float) -> None:
        """Wait for all works; raise `TimeoutError` at the deadline, `RankFailed` on a failure."""
        deadline = time.monotonic() + timeout_s
        while self._works:
            self._wait_one(self._works[0], deadline)
            self._works.pop(0)
        while self._finish:
            self._finish.pop(0)()

    def done(self) -> bool:
        """Whether every work is complete."""
        return all(work.is_completed() for work in self._works)

    def then(self, finish: Callable[[], object]) -> TorchTicket:
        """Call `finish` too, when all works are complete."""
        self._finish.append(finish)
        return self

    def _wait_one(self, work: dist.Work, deadline: float) -> None:
        while (left := deadline - time.monotonic()) > 0:
            try:
                work.wait(timedelta(seconds=max(min(left, _SLICE_S), 0.001)))
                return
            except RuntimeError as error:
                meaning = meaning_of(error)
                if meaning is Meaning.LATE:
                    raise TimeoutError(str(error)) from None
                if meaning is not Meaning.NOT_YET:
                    raise
            reason = hopeless()
            if reason is not None:
                raise reason
        raise TimeoutError


class MessageTicket:
    """Messages of gloo under way.

    gloo cannot be asked whether a message is complete, closes its connections when a wait for one
    runs out, and forgets a message whose handle is gone. So each is waited for once: by whoever
    wants it, or by a thread where it is only asked for, or where nobody holds it any more.

    Args:
        works: what gloo gave for them.
        timeout_s: deadline where somebody asks for them before anybody waits; None: the group's.
        check: called when all are complete.
    """

    def __init__(
        self,
        works: Sequence[dist.Work | None],
        timeout_s: float | None = None,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        self._check = check
        self._works = [work for work in works if work is not None]
        self._first = next(iter(self._works), None)
        self._timeout_s = timeout_s
        self._is_attended = False
        self._waiter: Future[None] | None = None

    def wait(self, timeout_s: float) -> None:
        """Wait for all messages; raise `TimeoutError` at the deadline."""
        self._is_attended = True
        calls.set_blocked(calls.waited())
        try:
            if self._waiter is None:
                _wait_for(self._works, timeout_s)
            else:
                self._waiter.result(timeout_s)
        finally:
            calls.set_blocked(None)
        self._check()

    def done(self) -> bool:
        """Whether `wait` would return (or raise) at once."""
        if not self._works:
            return True
        if self._waiter is None:
            self._waiter = _wait_in_thread(self._works, self._timeout_s)
        return self._waiter.done()

    @property
    def source(self) -> int:
        """Rank that sent the message, of a receive from anybody that is done."""
        return -1 if self._first is None else self._first._source_rank()

    def __del__(self) -> None:
        """See that messages arrive which nobody has waited for."""
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

    def all_reduce_(self, x: Tensor, op: str, **how: Unpack[How]) -> Ticket | None:
        """See `Engine`. A sum carried wider than it travels is cut in shares."""
        wide = accumulation_dtype(x.dtype, op)
        local_only = op == "product" and x.dtype.is_complex
        nbytes, rounds_once = x.nbytes, wide != x.dtype or local_only
        name = choose("all_reduce", nbytes, True, self.size, self.backend, rounds_once=rounds_once)
        self.last_algorithm = name
        if name == "all_to_all":
            copies = self._side_by_side(x)
            ticket = self.all_to_all(copies, [x] * self.size, **how)
            return ticket.then(partial(reduce_in_rank_order, x, copies, op))
        if name == "scatter_gather" and (not how["async_op"] or local_only):

            def swap(outs: Blocks, ins: Blocks) -> None:
                self.all_to_all(outs, ins, **how).wait(how["timeout_s"])

            reduce_among(x.view(-1), op, swap, self.rank, self.size, is_whole=False)
            return None
        return self._native_reduce(x, op, wide, dist.AllreduceOptions(), self.group.allreduce)

    def reduce_(self, x: Tensor, dst: int, op: str, **how: Unpack[How]) -> Ticket | None:
        if op == "product" and x.dtype.is_complex:
            return super().reduce_(x, dst, op, **how)
        self.last_algorithm = "native"
        options, wide = dist.ReduceOptions(), accumulation_dtype(x.dtype, op)
        options.rootRank = dst
        return self._native_reduce(x, op, wide, options, self.group.reduce)

    def broadcast_(self, x: Tensor, src: int, **how: Unpack[How]) -> Ticket | None:
        """See `Engine`. The source tells first what it sends: gloo itself compares nothing."""
        block, is_mine = bytes_of(x), self.rank == src
        if self.backend != "gloo":
            return TorchTicket([self._spread(block, src)]) if len(block) else None
        own, is_joined = (x.nbytes, DTYPE_NUMBERS[x.dtype]), x.nbytes <= SMALL_BYTES
        memory = bytearray(_HEAD.size + (x.nbytes if is_joined else 0))
        frame = torch.frombuffer(memory, dtype=torch.uint8)
        body = frame[_HEAD.size :]
        if is_mine:
            _HEAD.pack_into(memory, 0, *own)
            if is_joined:
                body.copy_(block)

        def unpack() -> None:
            if (told := _HEAD.unpack_from(memory)) != own:
                raise _unlike_source(x, src, *told)
            if is_joined and not is_mine:
                block.copy_(body)

        return TorchTicket([self._spread(y, src) for y in (frame, block)[: 2 - is_joined]], unpack)

    def _spread(self, block: Tensor, src: int) -> dist.Work:
        options = dist.BroadcastOptions()
        options.rootRank = src
        return self.group.broadcast([block], options)

    def all_gather(
        self, outs: Blocks, x: Tensor, *, alike: int = 0, **how: Unpack[How]
    ) -> Ticket | None:
        lengths = [out.numel() for out in outs]
        total = sum(lengths) * x.element_size()
        name = choose("all_gather", total, len(set(lengths)) == 1, self.size, self.backend)
        self.last_algorithm = name
        if total == 0:
            return None
        if name == "all_to_all":
            return self.all_to_all(outs, [x] * self.size, **how)
        raw = [bytes_of(out) for out in outs]
        if name == "native":
            return TorchTicket([self.group.allgather([raw], [bytes_of(x)])])
        outs[self.rank].copy_(x)
        return TorchTicket([self._spread(block, q) for q, block in enumerate(raw) if len(block)])

    def reduce_scatter(
        self, out: Tensor, ins: Blocks, op: str, *, alike: int = 0, **how: Unpack[How]
    ) -> Ticket | None:
        is_even = len({block.numel() for block in ins}) == 1
        name = choose(
            "reduce_scatter",
            sum(block.numel() for block in ins) * out.element_size(),
            is_even and out.dtype not in _WIDENED and not out.dtype.is_complex,
            self.size,
            self.backend,
            rounds_once=accumulation_dtype(out.dtype, op) != out.dtype,
        )
        self.last_algorithm = name
        if name == "native":
            joined = torch.cat([block.reshape(-1) for block in ins])
            work = dist.reduce_scatter_single(
                out.view(-1), joined, NATIVE_OPS[op], group=self.group, async_op=True
            )
            ticket = TorchTicket([work], keep=joined)
            return ticket.then(partial(out.div_, self.size)) if op == "mean" else ticket
        blocks = self._side_by_side(out)
        ticket = self.all_to_all(blocks, ins, **how)
        return ticket.then(partial(reduce_in_rank_order, out, blocks, op))

    def all_to_all(self, outs: Blocks, ins: Blocks, **how: Unpack[How]) -> TorchTicket:
        """See `Engine`. One flat transfer of bytes, any sizes."""
        send = one_block(ins)
        if send is None:
            send = torch.cat([bytes_of(block) for block in ins])
        received = [out.nbytes for out in outs]
        sent = [block.nbytes for block in ins]
        target = one_block(outs)
        recv = target if target is not None else send.new_empty(sum(received))
        work = self.group.alltoall_base(recv, send, received, sent, dist.AllToAllOptions())

        def unpack() -> None:
            if target is None:
                for out, block in zip(outs, recv.split(received), strict=True):
                    bytes_of(out).copy_(block)

        return TorchTicket([work], unpack, keep=send)

    def exchange(
        self, sends: Messages, recvs: Messages, tag: int, **how: Unpack[How]
    ) -> Ticket | None:
        ends = [bytes_of(x)[-len(_UNWRITTEN) :] for _, x in recvs]
        for end in ends:
            end.copy_(_UNWRITTEN[: len(end)])
        works = [self.group.recv([bytes_of(x)], src, tag) for src, x in recvs]
        works += [self.group.send([bytes_of(x)], dst, tag) for dst, x in sends]

        def check() -> None:
            for (src, x), end in zip(recvs, ends, strict=True):
                if torch.equal(end, _UNWRITTEN):
                    raise wrong_message(x, src, "shorter", tag)

        return MessageTicket(works, how["timeout_s"], check)

    def receive_any(self, x: Tensor, tag: int) -> SourceTicket:
        return MessageTicket([self.group.recv_anysource([bytes_of(x)], tag)])

    def barrier(self, **how: Unpack[How]) -> Ticket | None:
        options = dist.BarrierOptions()
        options.device = torch.device("cpu")  # else that of an accelerator which the group serves
        return TorchTicket([self.group.barrier(options)])

    def _native_reduce(
        self,
        x: Tensor,
        op: str,
        wide: torch.dtype,
        options: Any,
        start: Callable[[list[Tensor], Any], dist.Work],
    ) -> TorchTicket:
        """Let the backend reduce, in a dtype that it knows and that rounds once."""
        dtype = wide if wide != x.dtype else _WIDENED.get(x.dtype, x.dtype)
        options.reduceOp = NATIVE_OPS[BOOL_OPS.get(op, op) if x.dtype == torch.bool else op]
        work = x if dtype == x.dtype else x.to(dtype)
        plain = torch.view_as_real(work) if x.is_complex() else work
        ticket = TorchTicket([start([plain], options)])
        if op == "mean":
            ticket.then(partial(work.div_, self.size))
        return ticket if work is x else ticket.then(partial(x.copy_, work))

    def _side_by_side(self, x: Tensor) -> list[Tensor]:
        """Return room for one tensor like `x` from each rank, in one piece: nothing to unpack."""
        return list(x.new_empty((self.size, *x.shape)).unbind())


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


def _unlike_source(x: Tensor, src: int, nbytes: int, number: int) -> UnisonoError:
    """Return the error of a broadcast into `x` whose source has something else."""
    found, wanted = (str(dtype).removeprefix("torch.") for dtype in (DTYPES[number], x.dtype))
    return CollectiveMismatch.because(
        f"broadcast of {wanted} {list(x.shape)} from rank {src} of the group",
        f"that rank sends {nbytes // DTYPES[number].itemsize} elements of {found}",
        f"{nbytes} bytes of {found} != {x.numel()} * {x.itemsize} = {x.nbytes} bytes of {wanted}",
        "the shape and dtype of the source on all ranks, in x or in like=(shape, dtype)",
    )
