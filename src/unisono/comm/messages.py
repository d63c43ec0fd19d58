"""Messages between pairs of ranks of a communicator, and its shared buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from unisono.comm.arguments import (
    check_fits_memory,
    check_rank,
    check_shape,
    check_tag,
    check_target,
    check_tensor,
    check_timeout,
    refuse_transformed,
)
from unisono.comm.blocks import dense
from unisono.comm.call import Call
from unisono.comm.collectives import (
    Collectives,
    Like,
    StartedCollectives,
    leaves_graph,
    replaced,
)
from unisono.comm.perform import Pending, Transfer
from unisono.errors import MeshError, PartitionError

T = TypeVar("T")

EXCHANGE_TAG = 1 << 20
"""Tag of `exchange`, out of the way of the user's own tags."""


class Messages(Collectives):
    """Messages between the ranks of a communicator."""

    def send(self, x: Tensor, dst: int, tag: int = 0, *, timeout_s: float | None = None) -> None:
        """Send `x` to rank `dst`, which calls `recv`. Not collective."""
        self._perform(self._sent(x, dst, tag), timeout_s)

    def _sent(self, x: Tensor, dst: int, tag: int) -> Transfer[None]:
        check_tensor(x, self.device, "send")
        self._check_peer(dst, "dst", "send")
        check_tag(tag, "send")
        return self._exchanged("send", {dst: dense(x.detach())}, {}, tag, lambda: None)

    def recv(self, like: Like, src: int, tag: int = 0, *, timeout_s: float | None = None) -> Tensor:
        """Return the tensor that rank `src` sends; `like` gives its shape and dtype."""
        return self._perform(self._received(like, src, tag), timeout_s)

    def _received(self, like: Like, src: int, tag: int) -> Transfer[Tensor]:
        self._check_peer(src, "src", "recv")
        check_tag(tag, "recv")
        out = self._empty(like, "recv")
        return self._exchanged("recv", {}, {src: out}, tag, lambda: out)

    def recv_(
        self, out: Tensor, src: int, tag: int = 0, *, timeout_s: float | None = None
    ) -> Tensor:
        """Fill `out` with the tensor that rank `src` sends, and return it."""
        return self._perform(self._received_into(out, src, tag), timeout_s)

    def _received_into(self, out: Tensor, src: int, tag: int) -> Transfer[Tensor]:
        check_target(out, self.device, "recv_")
        self._check_peer(src, "src", "recv_")
        check_tag(tag, "recv_")
        leaves = leaves_graph(out, "recv_")
        work = dense(out.detach())

        def finish() -> Tensor:
            if work.data_ptr() != out.data_ptr():
                out.detach().copy_(work)
            replaced(out, leaves)
            return out

        return self._exchanged("recv", {}, {src: work}, tag, finish)

    def exchange(
        self,
        sends: Mapping[int, Tensor],
        recvs: Mapping[int, Like],
        *,
        timeout_s: float | None = None,
    ) -> dict[int, Tensor]:
        """Send to some ranks and receive from some, all at once; no pattern can deadlock.

        Called by the ranks that take part. What rank a sends to b, b must expect from a with the
        same shape and dtype. Empty tensors make no message.

        Args:
            sends: tensor for each destination.
            recvs: shape and dtype (or a tensor like it) from each source.
            timeout_s: deadline of this call.

        Returns:
            The tensor received from each source.
        """
        return self._perform(self._swapped_pairs(sends, recvs), timeout_s)

    def _swapped_pairs(
        self, sends: Mapping[int, Tensor], recvs: Mapping[int, Like]
    ) -> Transfer[dict[int, Tensor]]:
        for peer, x in sends.items():
            check_rank(peer, self.size, "destination", "exchange")
            check_tensor(x, self.device, "exchange")
        for peer in recvs:
            check_rank(peer, self.size, "source", "exchange")
        outs = {peer: self._empty(like, "exchange") for peer, like in recvs.items()}
        blocks = {peer: dense(x.detach()) for peer, x in sends.items()}
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
        return self._exchanged("exchange", blocks, remote, EXCHANGE_TAG, lambda: outs)

    def post_ints(
        self, values: Sequence[int], *, timeout_s: float | None = None
    ) -> Pending[list[tuple[int, ...]]]:
        """Send integers to all ranks and return at once; the answer is `all_gather_ints`'s.

        Called by all ranks, with equally many integers. Nobody is met before `wait()`, and there
        only ranks that have not posted yet. Each pair has a message of its own, so this is for
        small groups.
        """
        mine = torch.tensor(values, dtype=torch.int64, device=self.device)
        others = [rank for rank in range(self.size) if rank != self.rank]
        outs = {rank: torch.empty_like(mine) for rank in others}

        def finish() -> list[tuple[int, ...]]:
            told = {self.rank: values, **{rank: out.tolist() for rank, out in outs.items()}}
            return [tuple(told[rank]) for rank in range(self.size)]

        sends = dict.fromkeys(others, mine)
        posted = self._exchanged("post_ints", sends, outs, EXCHANGE_TAG, finish)
        return self._start(posted, timeout_s)

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
        deadline = self.timeout_s if timeout_s is None else check_timeout(timeout_s)
        with self._exchanging("shared_buffer", None, deadline):
            buffer = self._engine.shared_buffer(sizes, dtype, timeout_s=deadline)
        return buffer if buffer.device.type == self.device.type else buffer.to(self.device)

    def shared_views(self, buffer: Tensor) -> list[Tensor] | None:
        """Return every rank's tensor of a `shared_buffer`, by rank; None if memory is not shared.

        Local. What another rank writes is seen after both have met (`barrier`, any collective).
        """
        return self._engine.shared_views(buffer)

    def _exchanged(
        self,
        op: str,
        sends: Mapping[int, Tensor],
        recvs: Mapping[int, Tensor],
        tag: int,
        finish: Callable[[], T],
    ) -> Transfer[T]:
        """Prepare messages to and from several ranks; empty tensors make none."""
        if torch._C._are_functorch_transforms_active():
            for x in sends.values():
                refuse_transformed(x, op)
        outgoing = [(peer, x) for peer, x in sends.items() if x.numel()]
        incoming = [(peer, x) for peer, x in recvs.items() if x.numel()]
        call = self._described(op, None, sends_to=tuple(sends), receives_from=tuple(recvs))
        if tag <= EXCHANGE_TAG:  # others are announced before they are waited for
            self._number(call, [peer for peer, _ in outgoing], [peer for peer, _ in incoming], tag)
        call.sent = sum(x.numel() * x.element_size() for _, x in outgoing)
        call.received = sum(x.numel() * x.element_size() for _, x in incoming)
        return Transfer(
            call,
            lambda async_op, deadline: self._engine.exchange(
                outgoing, incoming, tag, async_op=async_op, timeout_s=deadline
            ),
            finish,
            is_collective=False,
        )

    def _check_peer(self, peer: int, what: str, verb: str) -> None:
        check_rank(peer, self.size, what, verb)
        if peer == self.rank:
            raise MeshError.because(
                f"{verb}({what}={peer})", f"this is rank {peer} itself", None, "copy the tensor"
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


class StartedVerbs(StartedCollectives):
    """All verbs of a communicator, left under way; see `StartedCollectives`."""

    _comm: Messages

    def send(
        self, x: Tensor, dst: int, tag: int = 0, *, timeout_s: float | None = None
    ) -> Pending[None]:
        """Start `send`."""
        return self._comm._start(self._comm._sent(x, dst, tag), timeout_s)

    def recv(
        self, like: Like, src: int, tag: int = 0, *, timeout_s: float | None = None
    ) -> Pending[Tensor]:
        """Start `recv`."""
        return self._comm._start(self._comm._received(like, src, tag), timeout_s)

    def recv_(
        self, out: Tensor, src: int, tag: int = 0, *, timeout_s: float | None = None
    ) -> Pending[Tensor]:
        """Start `recv_`."""
        return self._comm._start(self._comm._received_into(out, src, tag), timeout_s)

    def exchange(
        self,
        sends: Mapping[int, Tensor],
        recvs: Mapping[int, Like],
        *,
        timeout_s: float | None = None,
    ) -> Pending[dict[int, Tensor]]:
        """Start `exchange`."""
        return self._comm._start(self._comm._swapped_pairs(sends, recvs), timeout_s)


def _kind(x: Tensor | None) -> str:
    return "nothing" if x is None else f"{list(x.shape)} of {x.dtype}"
