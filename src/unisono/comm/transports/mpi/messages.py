"""Messages between pairs of ranks: posted at once, in any order with collectives.

MPI matches them by source and tag, in the order in which they were posted. They move on whenever
this process is inside MPI; the group's background thread looks after them when nobody waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from unisono.comm.messages import EXCHANGE_TAG
from unisono.comm.transports.mpi.line import MAX_BYTES, Ladder, Line, abandon
from unisono.comm.transports.mpi.moves import nbytes_of
from unisono.comm.transports.staging import wrong_message
from unisono.errors import UnisonoError

RESERVED_TAGS = 3
"""How many of the largest tags a group keeps for itself."""


class Transfer:
    """A message this rank sends or receives.

    Attributes:
        peer: the other rank of the group; None until it is known.
        is_done: whether it has ended, well or badly.
        error: what went wrong.
    """

    __slots__ = ("error", "is_done", "is_receive", "peer", "requests", "tag", "tensor")

    def __init__(self, tensor: Tensor, peer: int | None, tag: int, is_receive: bool) -> None:
        self.tensor = tensor
        self.tag = tag
        self.peer = peer
        self.is_receive = is_receive
        self.requests: list[tuple[Any, int]] = []
        """MPI requests with the bytes of each."""
        self.is_done = False
        self.error: BaseException | None = None


class Messages:
    """Messages of one rank in one group.

    Args:
        line: the group's line.
        max_tag: largest tag MPI allows.
    """

    def __init__(self, line: Line, max_tag: int) -> None:
        self._line = line
        self._max_tag = max_tag
        self._lock = threading.Lock()
        self._under_way: list[Transfer] = []

    @property
    def under_way(self) -> int:
        """How many messages have not ended."""
        return len(self._under_way)

    def post_send(self, dst: int, tag: int, x: Tensor) -> Transfer:
        """Start to send `x` to rank `dst`."""
        return self._post(Transfer(x, dst, tag, False), self._line.comm.Isend, dst)

    def post_recv(self, src: int | None, tag: int, x: Tensor) -> Transfer:
        """Start to receive `x` from rank `src`, or from anybody."""
        if src is None and nbytes_of(x) > self._line.chunk_bytes:
            raise UnisonoError.because(
                "a receive from anybody",
                f"{nbytes_of(x)} bytes, which travel in several messages",
                f"{nbytes_of(x)} > {self._line.chunk_bytes}",
                "name the source",
            )
        source = self._line.mpi.ANY_SOURCE if src is None else src
        return self._post(Transfer(x, src, tag, True), self._line.comm.Irecv, source)

    def _post(self, transfer: Transfer, call: Any, peer: int) -> Transfer:
        line, x = self._line, transfer.tensor
        wire_tag = self._wire_tag(transfer.tag)
        pieces = list(line.pieces(nbytes_of(x))) or [(0, 0)]
        with self._lock:
            for begin, length in pieces:
                memory = line.mpi.buffer.fromaddress(x.data_ptr() + begin, length)
                with line.threads.lock:
                    request = call([memory, line.mpi.BYTE], peer, wire_tag)
                transfer.requests.append((request, length))
            self._under_way.append(transfer)
        return transfer

    def _wire_tag(self, tag: int) -> int:
        free = self._max_tag - RESERVED_TAGS
        if 0 <= tag <= free:
            return tag
        if tag == EXCHANGE_TAG:  # an MPI with few tags
            return free + 1
        raise UnisonoError.because(
            f"a message with tag {tag}", f"this MPI has tags 0 to {free}", None, "a smaller tag"
        )

    def progress(self) -> bool:
        """Let messages move on; return whether one has ended."""
        if not self._under_way or not self._lock.acquire(blocking=False):
            return False
        try:
            before = len(self._under_way)
            for transfer in self._under_way:
                self._advance(transfer)
            self._under_way = [t for t in self._under_way if not t.is_done]
            return len(self._under_way) < before
        finally:
            self._lock.release()

    def _advance(self, transfer: Transfer) -> None:
        mpi = self._line.mpi
        try:
            while transfer.requests:
                request, expected = transfer.requests[0]
                status = mpi.Status()
                with self._line.threads.lock:
                    if not request.Test(status):
                        return
                transfer.requests.pop(0)
                if transfer.is_receive:
                    transfer.peer = status.Get_source()
                    self._check_length(transfer, expected, status.Get_count(mpi.BYTE))
        except mpi.Exception as error:
            abandon(transfer.tensor, transfer.requests)  # later pieces may still arrive in it
            transfer.requests = []
            transfer.error = self._translated(transfer, error)
        transfer.is_done = True

    def _translated(self, transfer: Transfer, error: Any) -> UnisonoError:
        """Return our error for one of MPI; of a message that is too long, only that is known."""
        if error.Get_error_class() == self._line.mpi.ERR_TRUNCATE and transfer.peer is not None:
            sender = self._line.watch.ranks[transfer.peer]
            return wrong_message(transfer.tensor, sender, None, transfer.tag)
        return self._line.translated(error)

    def _check_length(self, transfer: Transfer, expected: int, found: int) -> None:
        if found != expected and transfer.error is None:
            sender = -1 if transfer.peer is None else self._line.watch.ranks[transfer.peer]
            transfer.error = wrong_message(transfer.tensor, sender, found, transfer.tag)

    def wait(self, transfers: Sequence[Transfer], timeout_s: float) -> None:
        """Wait for messages; raises what went wrong with one of them."""
        if not all(transfer.is_done for transfer in transfers):
            self._wait(transfers, timeout_s)
        for transfer in transfers:
            if transfer.error is not None:
                raise transfer.error

    def _wait(self, transfers: Sequence[Transfer], timeout_s: float) -> None:
        line = self._line
        peers = sorted({t.peer for t in transfers if not t.is_done and t.peer is not None})
        nbytes = sum(nbytes_of(transfer.tensor) for transfer in transfers)
        ladder = Ladder(line.watch.begin(timeout_s, peers), min(nbytes, MAX_BYTES))
        before = time.perf_counter_ns()
        while True:
            self.progress()
            if all(transfer.is_done for transfer in transfers):
                break
            ladder.step()
        line.waited_ns += time.perf_counter_ns() - before

    def release(self) -> None:
        """Let go of messages that never ended: what is not received yet, never will be."""
        with self._lock:
            for transfer in self._under_way:
                for request, _ in transfer.requests:
                    if transfer.is_receive:
                        self._cancel(request)
                abandon(transfer)
            self._under_way = []

    def _cancel(self, request: Any) -> None:
        with self._line.threads.lock:
            try:
                request.Cancel()
                request.Test()
            except self._line.mpi.Exception:
                return  # it stays as it is, and so does its memory
