"""The verbs between pairs of ranks, the barrier, and shared buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeVar, cast, overload

import torch
from torch import Tensor

from unisono.comm.arguments import (
    check_fits_memory,
    check_not_transformed,
    check_rank,
    check_shape,
    check_tag,
    check_target,
    check_tensor,
)
from unisono.comm.call import Call
from unisono.comm.calling import Caller, Like, contiguous, detached
from unisono.comm.engine import NoteTicket
from unisono.comm.pending import Pending
from unisono.errors import PartitionError

T = TypeVar("T")

EXCHANGE_TAG = 1 << 20
"""Tag of `exchange`, out of the way of the user's own tags."""
NOTE_TAG = -1
"""Under which notes are counted."""


class MessageVerbs(Caller):
    """Messages between the ranks of a communicator."""

    @overload
    def send(
        self,
        x: Tensor,
        dst: int,
        tag: int = 0,
        *,
        async_op: Literal[False] = False,
        timeout_s: float | None = None,
    ) -> None: ...
    @overload
    def send(
        self,
        x: Tensor,
        dst: int,
        tag: int = 0,
        *,
        async_op: Literal[True],
        timeout_s: float | None = None,
    ) -> Pending[None]: ...
    def send(
        self,
        x: Tensor,
        dst: int,
        tag: int = 0,
        *,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Pending[None] | None:
        """Send `x` to rank `dst`, which calls `recv`. Not collective."""
        check_tensor(x, self.device, "send")
        self._check_peer(dst, "dst", "send")
        check_tag(tag, "send")
        work = contiguous(detached(x))
        return self._messages("send", {dst: work}, {}, tag, lambda: None, async_op, timeout_s)

    @overload
    def recv(
        self,
        like: Like,
        src: int,
        tag: int = 0,
        *,
        async_op: Literal[False] = False,
        timeout_s: float | None = None,
    ) -> Tensor: ...
    @overload
    def recv(
        self,
        like: Like,
        src: int,
        tag: int = 0,
        *,
        async_op: Literal[True],
        timeout_s: float | None = None,
    ) -> Pending[Tensor]: ...
    def recv(
        self,
        like: Like,
        src: int,
        tag: int = 0,
        *,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Tensor | Pending[Tensor]:
        """Return the tensor that rank `src` sends; `like` gives its shape and dtype."""
        self._check_peer(src, "src", "recv")
        check_tag(tag, "recv")
        out = self._empty(like, "recv")
        return self._messages("recv", {}, {src: out}, tag, lambda: out, async_op, timeout_s)

    @overload
    def recv_(
        self,
        out: Tensor,
        src: int,
        tag: int = 0,
        *,
        async_op: Literal[False] = False,
        timeout_s: float | None = None,
    ) -> Tensor: ...
    @overload
    def recv_(
        self,
        out: Tensor,
        src: int,
        tag: int = 0,
        *,
        async_op: Literal[True],
        timeout_s: float | None = None,
    ) -> Pending[Tensor]: ...
    def recv_(
        self,
        out: Tensor,
        src: int,
        tag: int = 0,
        *,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Tensor | Pending[Tensor]:
        """Fill `out` with the tensor that rank `src` sends, and return it."""
        check_target(out, self.device, "recv_")
        self._check_peer(src, "src", "recv_")
        check_tag(tag, "recv_")
        work = contiguous(detached(out))

        def finish() -> Tensor:
            if work.data_ptr() != out.data_ptr():
                out.detach().copy_(work)
            return out

        return self._messages("recv", {}, {src: work}, tag, finish, async_op, timeout_s)

    @overload
    def exchange(
        self,
        sends: Mapping[int, Tensor],
        recvs: Mapping[int, Like],
        *,
        async_op: Literal[False] = False,
        timeout_s: float | None = None,
    ) -> dict[int, Tensor]: ...
    @overload
    def exchange(
        self,
        sends: Mapping[int, Tensor],
        recvs: Mapping[int, Like],
        *,
        async_op: Literal[True],
        timeout_s: float | None = None,
    ) -> Pending[dict[int, Tensor]]: ...
    def exchange(
        self,
        sends: Mapping[int, Tensor],
        recvs: Mapping[int, Like],
        *,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> dict[int, Tensor] | Pending[dict[int, Tensor]]:
        """Send to some ranks and receive from some, all at once; no pattern can deadlock.

        Called by the ranks that take part. What rank a sends to b, b must expect from a with the
        same shape and dtype. Empty tensors make no message.

        Args:
            sends: tensor for each destination.
            recvs: shape and dtype (or a tensor like it) from each source.
            async_op: return a `Pending` instead of waiting.
            timeout_s: deadline of this call.

        Returns:
            The tensor received from each source.
        """
        for peer, x in sends.items():
            check_rank(peer, self.size, "destination", "exchange")
            check_tensor(x, self.device, "exchange")
        for peer in recvs:
            check_rank(peer, self.size, "source", "exchange")
        outs = {peer: self._empty(like, "exchange") for peer, like in recvs.items()}
        blocks = {peer: contiguous(detached(x)) for peer, x in sends.items()}
        mine = blocks.pop(self.rank, None)
        own = outs.get(self.rank)
        if _kind(mine) != _kind(own):
            raise PartitionError.because(
                f"exchange with oneself on rank {self.rank}",
                f"sends {_kind(mine)}, receives {_kind(own)}",
            )
        if mine is not None and own is not None:
            own.copy_(mine)
        remote = {peer: out for peer, out in outs.items() if peer != self.rank}
        return self._messages(
            "exchange", blocks, remote, EXCHANGE_TAG, lambda: outs, async_op, timeout_s
        )

    def post_ints(
        self, values: Sequence[int], *, timeout_s: float | None = None
    ) -> Pending[list[tuple[int, ...]]]:
        """Send integers to all ranks and return at once; the answer is `all_gather_ints`'s.

        Called by all ranks, with equally many integers. Nobody is met before `wait()`, and there
        only ranks that have not posted yet. Where memory is shared a few integers are left there
        for all to read; else each pair has a message of its own, so this is for small groups.
        """
        if 0 < len(values) <= self._engine.note_ints:
            return self._post_note(values, timeout_s)
        mine = torch.tensor(values, dtype=torch.int64, device=self.device)
        others = [rank for rank in range(self.size) if rank != self.rank]
        outs = {rank: torch.empty_like(mine) for rank in others}

        def finish() -> list[tuple[int, ...]]:
            told = {self.rank: values, **{rank: out.tolist() for rank, out in outs.items()}}
            return [tuple(told[rank]) for rank in range(self.size)]

        sends = dict.fromkeys(others, mine)
        pending = self._messages("post_ints", sends, outs, EXCHANGE_TAG, finish, True, timeout_s)
        return cast("Pending[list[tuple[int, ...]]]", pending)

    def _post_note(
        self, values: Sequence[int], timeout_s: float | None
    ) -> Pending[list[tuple[int, ...]]]:
        call = self._begin("post_ints", None, async_op=True, timeout_s=timeout_s, collective=False)
        others = tuple(rank for rank in range(self.size) if rank != self.rank)
        call.sends_to = call.receives_from = others
        self._number(call, others, others, NOTE_TAG)
        call.sent = call.received = len(others) * len(values) * 8
        deadline = self._deadline(timeout_s)
        posted: list[NoteTicket] = []

        def start() -> NoteTicket:
            posted.append(self._engine.post_note(values, timeout_s=deadline))
            return posted[0]

        pending = self._run(
            call, start, lambda: posted[0].rows or [], True, deadline, collective=False
        )
        return cast("Pending[list[tuple[int, ...]]]", pending)

    @overload
    def barrier(
        self,
        *,
        async_op: Literal[False] = False,
        timeout_s: float | None = None,
    ) -> None: ...
    @overload
    def barrier(
        self,
        *,
        async_op: Literal[True],
        timeout_s: float | None = None,
    ) -> Pending[None]: ...
    def barrier(
        self, *, async_op: bool = False, timeout_s: float | None = None
    ) -> Pending[None] | None:
        """Return when every rank has called it; on time-out the error names the missing ranks."""
        call = self._begin("barrier", None, async_op=async_op, timeout_s=timeout_s)
        deadline = self._deadline(timeout_s)
        return self._run(
            call,
            lambda: self._engine.barrier(async_op=async_op, timeout_s=deadline),
            lambda: None,
            async_op,
            deadline,
        )

    def shared_buffer(
        self,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        *,
        timeout_s: float | None = None,
    ) -> Tensor:
        """Return zeros that live in the group's shared memory, where its backend has one.

        Collective over the communicator. A collective on the buffer, or on a contiguous view of
        it, moves no bytes; on other backends it is plain memory.
        """
        sizes = check_shape(shape, "shared_buffer")
        check_fits_memory(sizes, dtype, self.size, "shared_buffer")
        deadline = self._deadline(timeout_s)
        with self._reporting("shared_buffer", None, deadline):
            buffer = self._engine.shared_buffer(sizes, dtype, timeout_s=deadline)
        return buffer if buffer.device.type == self.device.type else buffer.to(self.device)

    def shared_views(self, buffer: Tensor) -> list[Tensor] | None:
        """Return every rank's tensor of a `shared_buffer`, by rank; None if memory is not shared.

        Local. What another rank writes is seen after both have met (`barrier`, any collective).
        """
        return self._engine.shared_views(buffer)

    def _messages(
        self,
        op: str,
        sends: Mapping[int, Tensor],
        recvs: Mapping[int, Tensor],
        tag: int,
        finish: Callable[[], T],
        async_op: bool,
        timeout_s: float | None,
    ) -> T | Pending[T]:
        for x in sends.values():
            check_not_transformed(x, op)
        call = self._begin(op, None, async_op=async_op, timeout_s=timeout_s, collective=False)
        call.sends_to, call.receives_from = tuple(sends), tuple(recvs)
        if tag <= EXCHANGE_TAG:  # others are announced before they are waited for
            sent = [peer for peer, x in sends.items() if x.numel()]
            self._number(call, sent, [peer for peer, x in recvs.items() if x.numel()], tag)
        call.sent = sum(x.numel() * x.element_size() for x in sends.values())
        call.received = sum(x.numel() * x.element_size() for x in recvs.values())
        deadline = self._deadline(timeout_s)
        return self._run(
            call,
            lambda: self._engine.exchange(
                [(peer, x) for peer, x in sends.items() if x.numel()],
                [(peer, x) for peer, x in recvs.items() if x.numel()],
                tag,
                async_op=async_op,
                timeout_s=deadline,
            ),
            finish,
            async_op,
            deadline,
            collective=False,
        )

    def _number(self, call: Call, to: Sequence[int], of: Sequence[int], tag: int) -> None:
        """Count messages, so that one which will never be sent is told from a late one."""
        sent, awaited, ranks = self._entry.sent, self._entry.awaited, self.ranks
        for peer in to:
            key = (ranks[peer], tag)
            sent[key] = sent.get(key, 0) + 1
        numbers: list[tuple[int, int, int]] = []
        for peer in of:
            key = (ranks[peer], tag)
            awaited[key] = number = awaited.get(key, 0) + 1
            numbers.append((*key, number))
        call.awaits = tuple(numbers)


def _kind(x: Tensor | None) -> str:
    return "nothing" if x is None else f"{list(x.shape)} of {x.dtype}"
