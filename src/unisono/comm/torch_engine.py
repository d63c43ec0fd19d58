"""The kernels over torch.distributed's own backends (gloo, nccl).

Tensors travel as bytes where they are only moved, so every dtype works; reductions a backend does
not know are done in a wider dtype or locally, in rank order. The chooser picks the algorithm.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.comm.algorithms import choose
from unisono.comm.engine import Engine, Ticket
from unisono.comm.gloo_messages import MessageTicket
from unisono.comm.outlook import hopeless
from unisono.comm.raw import bytes_of
from unisono.comm.reductions import accumulation_dtype, reduce_in_rank_order

_SLICE_S = 0.5
"""A blocked rank looks this often whether its wait can still end."""

_NATIVE_OPS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "and": dist.ReduceOp.BAND,
    "or": dist.ReduceOp.BOR,
    "xor": dist.ReduceOp.BXOR,
}
_WIDENED: dict[torch.dtype, torch.dtype] = {torch.int16: torch.int32, torch.bool: torch.uint8}


class TorchTicket:
    """Works of torch.distributed, and what to do on this rank when they are complete."""

    def __init__(
        self, works: Sequence[dist.Work], finish: Callable[[], None] | None = None
    ) -> None:
        self._works = list(works)
        self._finish = finish
        self.keep: Tensor | None = None

    def wait(self, timeout_s: float) -> None:
        """Wait for all works; raise `TimeoutError` at the deadline, `RankFailed` on a failure."""
        deadline = time.monotonic() + timeout_s
        while self._works:
            self._wait_one(self._works[0], deadline)
            self._works.pop(0)
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()

    def done(self) -> bool:
        """Whether every work is complete."""
        return all(work.is_completed() for work in self._works)

    def _wait_one(self, work: dist.Work, deadline: float) -> None:
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            try:
                work.wait(timedelta(seconds=max(min(left, _SLICE_S), 0.001)))
                return
            except RuntimeError as error:
                words = str(error)
                if "Operation timed out" in words:
                    reason = hopeless()
                    if reason is not None:
                        raise reason from None
                    continue
                if "imed out" in words:
                    raise TimeoutError(words) from None
                raise


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
        self.last_algorithm = "native"

    def all_reduce_(self, x: Tensor, op: str, *, async_op: bool, timeout_s: float) -> Ticket | None:
        """See `Engine`. A sum carried wider than it travels is cut in shares."""
        wide = accumulation_dtype(x.dtype, op)
        local_only = op == "product" and x.dtype.is_complex
        name = choose(
            "all_reduce",
            x.numel() * x.element_size(),
            True,
            self.size,
            self.backend,
            rounds_once=wide != x.dtype or local_only,
        )
        self.last_algorithm = name
        if name == "all_to_all":
            copies = self._side_by_side(x)
            ticket = self.all_to_all(
                copies, [x] * self.size, async_op=async_op, timeout_s=timeout_s
            )
            return _then(ticket, lambda: reduce_in_rank_order(x, copies, op))
        if name == "scatter_gather" and (not async_op or local_only):
            return self._scatter_gather(x, op, timeout_s)
        return self._native_reduce(
            x,
            op,
            wide,
            lambda t, native: dist.all_reduce(t, native, group=self.group, async_op=True),
        )

    def reduce_(
        self, x: Tensor, dst: int, op: str, *, async_op: bool, timeout_s: float
    ) -> Ticket | None:
        """See `Engine`."""
        wide = accumulation_dtype(x.dtype, op)
        if op == "product" and x.dtype.is_complex:
            blocks = [torch.empty_like(x) for _ in range(self.size)] if self.rank == dst else None
            ticket = self.gather(blocks, x, dst, async_op=async_op, timeout_s=timeout_s)
            return _then(ticket, lambda: reduce_in_rank_order(x, blocks, op) if blocks else None)
        self.last_algorithm = "native"
        return self._native_reduce(
            x,
            op,
            wide,
            lambda t, native: dist.reduce(
                t, group_dst=dst, op=native, group=self.group, async_op=True
            ),
        )

    def broadcast_(self, x: Tensor, src: int, *, async_op: bool, timeout_s: float) -> Ticket | None:
        """See `Engine`."""
        if x.numel() == 0:
            return None
        work = dist.broadcast(bytes_of(x), group_src=src, group=self.group, async_op=True)
        return _ticket(work)

    def all_gather(
        self, outs: Sequence[Tensor], x: Tensor, *, alike: int = 0, async_op: bool, timeout_s: float
    ) -> Ticket | None:
        """See `Engine`."""
        lengths = {out.numel() for out in outs}
        total = sum(out.numel() for out in outs) * x.element_size()
        name = choose("all_gather", total, len(lengths) == 1, self.size, self.backend)
        self.last_algorithm = name
        if total == 0:
            return None
        if name == "all_to_all":
            return self.all_to_all(outs, [x] * self.size, async_op=async_op, timeout_s=timeout_s)
        if name == "native":
            work = dist.all_gather(
                [bytes_of(out) for out in outs], bytes_of(x), group=self.group, async_op=True
            )
            return _ticket(work)
        outs[self.rank].copy_(x)
        works = [
            dist.broadcast(bytes_of(out), group_src=src, group=self.group, async_op=True)
            for src, out in enumerate(outs)
            if out.numel()
        ]
        return TorchTicket([work for work in works if work is not None])

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
        even = len({block.numel() for block in ins}) == 1
        total = sum(block.numel() for block in ins) * out.element_size()
        wide = accumulation_dtype(out.dtype, op) != out.dtype
        name = choose(
            "reduce_scatter",
            total,
            even and out.dtype not in _WIDENED and not out.dtype.is_complex,
            self.size,
            self.backend,
            rounds_once=wide,
        )
        self.last_algorithm = name
        if name == "native":
            joined = torch.cat([block.reshape(-1) for block in ins])
            work = dist.reduce_scatter_single(
                out.view(-1), joined, _NATIVE_OPS[op], group=self.group, async_op=True
            )
            return _ticket(work, keep=joined)
        blocks = self._side_by_side(out)
        ticket = self.all_to_all(blocks, ins, async_op=async_op, timeout_s=timeout_s)
        return _then(ticket, lambda: reduce_in_rank_order(out, blocks, op))

    def all_to_all(
        self, outs: Sequence[Tensor], ins: Sequence[Tensor], *, async_op: bool, timeout_s: float
    ) -> Ticket | None:
        """See `Engine`. One flat transfer of bytes, any sizes."""
        send = _joined(ins)
        recv_sizes = [out.numel() * out.element_size() for out in outs]
        target = _one_block(outs)
        recv = target if target is not None else send.new_empty(sum(recv_sizes))
        work = dist.all_to_all_single(
            recv,
            send,
            recv_sizes,
            [block.numel() * block.element_size() for block in ins],
            group=self.group,
            async_op=True,
        )

        def unpack() -> None:
            if target is None:
                for out, block in zip(outs, recv.split(recv_sizes), strict=True):
                    bytes_of(out).copy_(block)

        return _ticket(work, unpack, keep=send)

    def gather(
        self,
        outs: Sequence[Tensor] | None,
        x: Tensor,
        dst: int,
        *,
        async_op: bool,
        timeout_s: float,
    ) -> Ticket | None:
        """See `Engine`. An all-to-all in which only `dst` receives."""
        nothing = x.new_empty(0)
        ins = [x if peer == dst else nothing for peer in range(self.size)]
        received = [nothing] * self.size if outs is None else outs
        return self.all_to_all(received, ins, async_op=async_op, timeout_s=timeout_s)

    def scatter(
        self,
        out: Tensor,
        ins: Sequence[Tensor] | None,
        src: int,
        *,
        async_op: bool,
        timeout_s: float,
    ) -> Ticket | None:
        """See `Engine`. An all-to-all in which only `src` sends."""
        nothing = out.new_empty(0)
        outs = [out if peer == src else nothing for peer in range(self.size)]
        sent = [nothing] * self.size if ins is None else ins
        return self.all_to_all(outs, sent, async_op=async_op, timeout_s=timeout_s)

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        recvs: Sequence[tuple[int, Tensor]],
        tag: int,
        *,
        async_op: bool,
        timeout_s: float,
    ) -> Ticket | None:
        """See `Engine`."""
        if self.backend == "nccl":
            posts = [
                dist.P2POp(op, bytes_of(x), group=self.group, tag=tag, group_peer=peer)
                for op, side in ((dist.irecv, recvs), (dist.isend, sends))
                for peer, x in side
            ]
            return TorchTicket(dist.batch_isend_irecv(posts)) if posts else None
        works = [
            *(dist.irecv(bytes_of(x), group=self.group, tag=tag, group_src=p) for p, x in recvs),
            *(dist.isend(bytes_of(x), group=self.group, tag=tag, group_dst=p) for p, x in sends),
        ]
        return MessageTicket([work for work in works if work is not None], timeout_s)

    def barrier(self, *, async_op: bool, timeout_s: float) -> Ticket | None:
        """See `Engine`."""
        return _ticket(dist.barrier(group=self.group, async_op=True))

    def all_gather_ints(self, values: Sequence[int], *, timeout_s: float) -> list[tuple[int, ...]]:
        """See `Engine`."""
        device = "cuda" if self.backend == "nccl" else "cpu"
        mine = torch.tensor(list(values), dtype=torch.int64, device=device)
        everybody = mine.new_empty(self.size, len(mine))
        ticket = self.all_gather(
            list(everybody.unbind()), mine, async_op=False, timeout_s=timeout_s
        )
        if ticket is not None:
            ticket.wait(timeout_s)
        return [tuple(row) for row in everybody.tolist()]

    def _native_reduce(
        self,
        x: Tensor,
        op: str,
        wide: torch.dtype,
        start: Callable[[Tensor, Any], dist.Work | None],
    ) -> Ticket | None:
        """Let the backend reduce, in a dtype that it knows and that rounds once."""
        dtype = wide if wide != x.dtype else _WIDENED.get(x.dtype, x.dtype)
        if x.dtype == torch.bool:
            op = {"sum": "or", "max": "or", "product": "and", "min": "and"}.get(op, op)
        native = _NATIVE_OPS["sum" if op == "sum64" else op]
        if dtype == x.dtype:
            view = torch.view_as_real(x) if x.dtype.is_complex else x
            return _ticket(start(view, native))
        scratch = x.to(dtype)
        return _ticket(start(scratch, native), lambda: _assign(x, scratch))

    def _side_by_side(self, x: Tensor) -> list[Tensor]:
        """Return room for one tensor like `x` from each rank, in one piece: nothing to unpack."""
        return list(x.new_empty((self.size, *x.shape)).unbind())

    def _scatter_gather(self, x: Tensor, op: str, timeout_s: float) -> Ticket | None:
        """Reduce own share in rank order, then gather the shares. Blocks in its first half."""
        shares = list(x.view(-1).tensor_split(self.size))
        mine = torch.empty_like(shares[self.rank])
        blocks = self._side_by_side(mine)
        first = self.all_to_all(blocks, shares, async_op=False, timeout_s=timeout_s)
        if first is not None:
            first.wait(timeout_s)
        reduce_in_rank_order(mine, blocks, op)
        second = self.all_gather(shares, mine, async_op=False, timeout_s=timeout_s)
        self.last_algorithm = "scatter_gather"
        return second


def _assign(x: Tensor, value: Tensor) -> None:
    x.copy_(value)


def _joined(blocks: Sequence[Tensor]) -> Tensor:
    """Return the bytes of all blocks in one flat tensor; a view where they lie side by side."""
    whole = _one_block(blocks)
    return whole if whole is not None else torch.cat([bytes_of(block) for block in blocks])


def _one_block(blocks: Sequence[Tensor]) -> Tensor | None:
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
        end += block.numel() * block.element_size()
    whole = torch.empty(0, dtype=torch.uint8, device=first.device)
    return whole.set_(first.untyped_storage(), begin - storage, (end - begin,), (1,))


def _ticket(
    work: dist.Work | None, finish: Callable[[], None] | None = None, *, keep: Tensor | None = None
) -> TorchTicket:
    """Wrap one work; `keep` lives as long as the ticket."""
    ticket = TorchTicket([] if work is None else [work], finish)
    ticket.keep = keep
    return ticket


def _then(ticket: Ticket | None, finish: Callable[[], None]) -> Ticket | None:
    """Run `finish` after `ticket`; at once when there is nothing to wait for."""
    if ticket is None:
        finish()
        return None
    if not isinstance(ticket, TorchTicket):
        raise TypeError(f"not a ticket of this engine: {ticket!r}")
    before = ticket._finish

    def both() -> None:
        if before is not None:
            before()
        finish()

    ticket._finish = both
    return ticket
