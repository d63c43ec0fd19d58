"""Messages between pairs of ranks of a communicator, and its shared buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from unisono.comm.arguments import (
    check_rank,
    check_tag,
    check_target,
    check_tensor,
    dense,
    whole_numbers,
)
from unisono.comm.call import Call
from unisono.comm.collectives import Collectives, Like, leaves_graph, replaced
from unisono.comm.perform import EXCHANGE_TAG, PreparedCall, started, verb
from unisono.comm.reductions import DTYPE_NUMBERS
from unisono.errors import MeshError, PartitionError, UnisonoError
from unisono.expect import expect


class MessageVerbs(Collectives):
    """Messages between the ranks of a communicator."""

    @verb
    def send(
        self, x: Tensor, dst: int, tag: int = 0, *, timeout_s: float | None = None
    ) -> PreparedCall[None]:
        """Send `x` to rank `dst`, which calls `recv`. Not collective."""
        check_tensor(x, self.device, "send")
        dst = self._check_peer(dst, "dst", "send")
        tag = self._check_tag(tag, "send")
        sends = {dst: dense(x.detach())}
        return self._messages("send", sends, {}, tag, lambda: None, timeout_s)

    @verb
    def recv(
        self, like: Like, src: int, tag: int = 0, *, timeout_s: float | None = None
    ) -> PreparedCall[Tensor]:
        """Return the tensor that rank `src` sends; `like` gives its shape and dtype."""
        src = self._check_peer(src, "src", "recv")
        tag = self._check_tag(tag, "recv")
        out = self._empty(like, "recv")
        return self._messages("recv", {}, {src: out}, tag, lambda: out, timeout_s)

    @verb
    def recv_(
        self, out: Tensor, src: int, tag: int = 0, *, timeout_s: float | None = None
    ) -> PreparedCall[Tensor]:
        """Fill `out` with the tensor that rank `src` sends, and return it."""
        check_target(out, self.device, "recv_")
        src = self._check_peer(src, "src", "recv_")
        tag = self._check_tag(tag, "recv_")
        leaves = leaves_graph(out, "recv_")
        work = dense(out.detach())

        def finish() -> Tensor:
            if work.data_ptr() != out.data_ptr():
                out.detach().copy_(work)
            replaced(out, leaves)
            return out

        return self._messages("recv", {}, {src: work}, tag, finish, timeout_s)

    @verb
    def exchange(
        self,
        sends: Mapping[int, Tensor],
        recvs: Mapping[int, Like],
        *,
        timeout_s: float | None = None,
    ) -> PreparedCall[dict[int, Tensor]]:
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
        blocks: dict[int, Tensor] = {}
        for name, side in (("sends", sends), ("recvs", recvs)):
            expect(name, side, Mapping, "exchange({dst: tensor}, {src: tensor like it})")
        for peer, x in sends.items():
            dst = check_rank(peer, self.size, "destination", "exchange")
            blocks[dst] = dense(check_tensor(x, self.device, "exchange").detach())
        sources = {check_rank(peer, self.size, "source", "exchange"): peer for peer in recvs}
        outs = {src: self._empty(recvs[peer], "exchange") for src, peer in sources.items()}
        sent, received = blocks.pop(self.rank, None), outs.get(self.rank)
        if _kind(sent) != _kind(received):
            raise PartitionError.because(
                f"exchange with oneself on rank {self.rank}",
                f"sends {_kind(sent)}, receives {_kind(received)}",
            )
        if sent is not None and received is not None:
            received.copy_(sent)
        remote = {peer: out for peer, out in outs.items() if peer != self.rank}
        return self._messages("exchange", blocks, remote, EXCHANGE_TAG, lambda: outs, timeout_s)

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
        sizes = whole_numbers(shape)
        if sizes is None or min(sizes, default=0) < 0 or dtype not in DTYPE_NUMBERS:
            raise UnisonoError.because(
                f"shared_buffer({shape!r}, {dtype!r})",
                "no list of sizes, or no dtype that travels",
                None,
                "shared_buffer((1000, 20), torch.float32)",
            )
        call = Call("shared_buffer", self._entry.name, self._entry.key)
        kernel = partial(self._engine.shared_buffer, sizes, dtype)
        buffer = self._perform(PreparedCall(call, kernel, None, timeout_s, is_quiet=True))
        return buffer if buffer.device.type == self.device.type else buffer.to(self.device)

    def _check_tag(self, tag: int, verb: str) -> int:
        tag = check_tag(tag, verb)
        if tag and not self._engine.has_tags:
            raise UnisonoError.because(
                f"{verb}(tag={tag}) of a tensor on {self.device}",
                f"{self._engine.backend} delivers the messages of two ranks in order, without tags",
                None,
                f"{verb}(...) without a tag, in the same order on both ranks",
            )
        return tag

    def _check_peer(self, peer: int, what: str, verb: str) -> int:
        peer = check_rank(peer, self.size, what, verb)
        if peer == self.rank:
            raise MeshError.because(
                f"{verb}({what}={peer})", f"this is rank {peer} itself", None, "copy the tensor"
            )
        return peer


class StartedVerbs:
    """The verbs of a communicator, left under way: `comm.start.all_reduce(x).wait()`.

    Each has the arguments of the verb of that name and returns a `Pending`. The tensors involved
    must not be changed before `wait()` has returned. Where lengths are not given they are agreed on
    before the call returns.
    """

    def __init__(self, comm: MessageVerbs) -> None:
        self._comm = comm

    all_reduce = started(MessageVerbs.all_reduce)
    all_reduce_ = started(MessageVerbs.all_reduce_)
    reduce = started(MessageVerbs.reduce)
    reduce_scatter = started(MessageVerbs.reduce_scatter)
    broadcast = started(MessageVerbs.broadcast)
    broadcast_ = started(MessageVerbs.broadcast_)
    all_gather = started(MessageVerbs.all_gather)
    gather = started(MessageVerbs.gather)
    scatter = started(MessageVerbs.scatter)
    all_to_all = started(MessageVerbs.all_to_all)
    barrier = started(MessageVerbs.barrier)
    all_gather_object = started(MessageVerbs.all_gather_object)
    gather_object = started(MessageVerbs.gather_object)
    broadcast_object = started(MessageVerbs.broadcast_object)
    all_equal = started(MessageVerbs.all_equal)
    send = started(MessageVerbs.send)
    recv = started(MessageVerbs.recv)
    recv_ = started(MessageVerbs.recv_)
    exchange = started(MessageVerbs.exchange)


def _kind(x: Tensor | None) -> str:
    return "nothing" if x is None else f"{list(x.shape)} of {x.dtype}"
