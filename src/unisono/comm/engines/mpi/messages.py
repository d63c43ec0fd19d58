"""Messages between pairs of ranks of a group over MPI.

They are posted at once, in any order with collectives. MPI matches them by source and tag, in the
order in which they were posted. They move on whenever this process is inside MPI; the group's
background thread looks after them while no thread waits.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from unisono.comm.engines.mpi.channel import MAX_BYTES, Channel, Wait, abandon
from unisono.comm.reductions import DTYPE_NUMBERS, DTYPES
from unisono.comm.torch.staging import wrong_message
from unisono.errors import CollectiveMismatch, UnisonoError

_HEAD = struct.Struct("<3q")


def _head_of(x: Tensor, tag: int) -> bytes:
    return _HEAD.pack(x.nbytes, DTYPE_NUMBERS.get(x.dtype, -1), tag)


@dataclass(slots=True, eq=False)
class MpiTransfer:
    """A message this rank sends or receives."""

    tensor: Tensor
    peer: int | None
    """The other rank of the group; None until it is known."""
    tag: int
    is_receive: bool
    head: bytearray
    """What a message tells first: its bytes, dtype and tag."""
    requests: list[tuple[Any, int]] = field(default_factory=list)
    """MPI requests with the bytes of each."""
    is_done: bool = False
    """Whether it has ended, well or badly."""
    error: BaseException | None = None


class MessageQueue:
    """Messages of one rank in one group.

    Args:
        channel: the group's channel.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self.under_way: list[MpiTransfer] = []
        """Those that have not ended."""

    def post(self, peer: int | None, tag: int, x: Tensor, *, is_receive: bool) -> MpiTransfer:
        """Start to send `x` to a rank, or to receive it from one (None: from any rank)."""
        channel, mpi = self._channel, self._channel.mpi
        if peer is None and x.nbytes > channel.chunk_bytes:
            raise UnisonoError.because(
                "a receive from any rank",
                f"{x.nbytes} bytes, which travel in several messages",
                f"{x.nbytes} > {channel.chunk_bytes}",
                "name the source",
            )
        head = bytearray(_HEAD.size) if is_receive else bytearray(_head_of(x, tag))
        transfer, wire_tag = MpiTransfer(x, peer, tag, is_receive, head), channel.wire_tag(tag)
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

    def _advance(self, transfer: MpiTransfer) -> None:
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
                    nbytes = status.Get_elements(mpi.BYTE)
                    head = _head_of(transfer.tensor, transfer.tag)
                    is_right = nbytes == expected and transfer.head == head
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

    def _wrong(
        self, transfer: MpiTransfer, nbytes: int | str, number: int = -1, tag: int | None = None
    ) -> UnisonoError:
        """Return the error for a message of another length, dtype or tag; see `wrong_message`."""
        sender = -1 if transfer.peer is None else self._channel.watch.ranks[transfer.peer]
        if tag is not None and tag != transfer.tag:
            limit = self._channel.tags
            return CollectiveMismatch.because(
                f"a receive with tag {transfer.tag} from rank {sender}",
                f"a message with tag {tag}, which this MPI cannot tell from it",
                f"it has {limit} tags: {tag} % {limit} = {transfer.tag} % {limit}",
                f"tags below {limit}",
            )
        sent = DTYPES[number] if 0 <= number < len(DTYPES) else None
        return wrong_message(transfer.tensor, sender, nbytes, transfer.tag, sent)

    def wait(self, transfers: Sequence[MpiTransfer], timeout_s: float) -> None:
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
