"""Transfers of one group over its communicator: started without waiting, then waited for.

MPI is never asked to block: every wait is a loop of `Test` calls with a deadline. Memory that a
failed transfer may still touch is kept for ever.

Messages between pairs of ranks are posted at once, in any order with collectives. MPI matches them
by source and tag, in the order in which they were posted. They move on whenever this process is
inside MPI; the group's background thread looks after them when nobody waits.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from unisono.comm.engines.mpi.health import Wait, Watch
from unisono.comm.engines.mpi.library import Threads
from unisono.comm.messages import EXCHANGE_TAG
from unisono.comm.torch.staging import wrong_message
from unisono.cores import usable_cores
from unisono.errors import CollectiveMismatch, RankFailed, UnisonoError

if TYPE_CHECKING:
    from mpi4py import MPI

CHUNK_BYTES = 256 * 1024 * 1024
"""Longest stretch that goes in one MPI call; MPI counts bytes in 32 bits."""
MAX_BYTES = 2**31 - 1

_SPINS = 100
_RESERVED_TAGS = 2
"""The largest tags a group keeps for itself: goodbyes, and `exchange` where tags are few."""
_LOST = ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_PROC_ABORTED", "ERR_REVOKED")

_abandoned: list[Any] = []


def abandon(*things: object) -> None:
    """Keep requests and memory that MPI may still use, to the end of the process."""
    _abandoned.append(things)


def nbytes_of(x: Tensor) -> int:
    """Return the number of bytes of the elements of `x`."""
    return x.numel() * x.element_size()


class Channel:
    """Starts transfers of one group and waits for them; one kernel at a time.

    Args:
        mpi: the module `mpi4py.MPI`.
        comm: communicator of the group.
        threads: what threads may do.
        watch: judges the peers.
    """

    def __init__(self, mpi: Any, comm: MPI.Intracomm, threads: Threads, watch: Watch) -> None:
        self.mpi = mpi
        self.comm = comm
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.threads = threads
        self.watch = watch
        self.chunk_bytes = CHUNK_BYTES
        self.timeout_s = 600.0
        """Deadline of each wait."""
        self.behind = False
        """Whether the kernel runs beside the thread that computes."""
        self.waited_ns = 0
        """Time spent in waits so far."""
        self.max_tag = int(mpi.COMM_WORLD.Get_attr(mpi.TAG_UB))
        self._spins = _SPINS if self.size <= usable_cores() else 2
        self._open: list[Any] = []
        self._held: list[Tensor] = []
        self._nbytes = 0
        self._goodbyes: list[Any] = []

    def memory(self, x: Tensor, begin: int = 0, nbytes: int | None = None) -> Any:
        """Return bytes of a contiguous tensor as MPI takes them; `x` lives until `finish`."""
        length = nbytes_of(x) - begin if nbytes is None else nbytes
        self._held.append(x)
        self._nbytes += length
        return self.mpi.buffer.fromaddress(x.data_ptr() + begin, length)

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Let tensors live until `finish`."""
        for x in tensors:
            self._held.append(x)
            self._nbytes += nbytes_of(x)

    def pieces(self, nbytes: int) -> Iterator[tuple[int, int]]:
        """Yield begin and length of the stretches in which `nbytes` bytes travel."""
        for begin in range(0, nbytes, self.chunk_bytes):
            yield begin, min(self.chunk_bytes, nbytes - begin)

    def start(self, call: Callable[..., Any], *args: Any) -> None:
        """Start a non-blocking MPI call."""
        with self.threads.lock:
            self._open.append(call(*args))

    def finish(self) -> None:
        """Wait for everything that was started."""
        requests, lock = self._open, self.threads.lock
        spins, wait, began = 0 if self.behind else self._spins, None, 0
        while requests:
            with lock:
                done = requests[-1].Test()
            if done:
                requests.pop()
            elif spins > 0:
                spins -= 1
            elif wait is None:
                began = time.perf_counter_ns()
                wait = Wait(self.watch, self.timeout_s, self._nbytes)
            else:
                self.step(wait)
        if wait is not None:
            self.waited_ns += time.perf_counter_ns() - began
        self._held.clear()
        self._nbytes = 0

    def step(self, wait: Wait) -> None:
        """Let some time pass in a wait, and look for ranks that have left."""
        if wait.step():
            self.hear_goodbyes()

    def say_goodbye(self) -> None:
        """Tell the other ranks that this one leaves, after so many collectives."""
        made = str(self.watch.number).encode()
        for peer in range(self.size):
            if peer != self.rank:
                with self.threads.lock, contextlib.suppress(self.mpi.Exception):
                    block = [made, self.mpi.BYTE]
                    self._goodbyes.append(self.comm.Isend(block, peer, self.max_tag))

    def hear_goodbyes(self) -> None:
        """Take down the ranks that have left the group so far."""
        mpi = self.mpi
        while True:
            with self.threads.lock:
                status = mpi.Status()
                message = self.comm.Improbe(mpi.ANY_SOURCE, self.max_tag, status)
                if message is None:
                    return
                room = bytearray(status.Get_count(mpi.BYTE))
                message.Recv([room, mpi.BYTE])
            self.watch.gone[status.Get_source()] = int(room)

    def has_everybody_left(self) -> bool:
        """Whether all other ranks have said that they leave, and know that this one does."""
        self.hear_goodbyes()
        with self.threads.lock:
            delivered = self.mpi.Request.Testall(self._goodbyes)
        return delivered and len(self.watch.gone) == self.size - 1

    @contextlib.contextmanager
    def kernel(self) -> Iterator[None]:
        """Run one kernel: errors of MPI become ours, and what is left open is kept alive."""
        try:
            yield
        except BaseException as error:
            abandon(self._open, self._held)
            self._open, self._held, self._nbytes = [], [], 0
            if isinstance(error, self.mpi.Exception):
                raise self.translated(error) from error
            raise

    def translated(self, error: Any) -> UnisonoError:
        """Return our error for one of MPI."""
        mpi, me = self.mpi, self.watch.me
        kind, words = error.Get_error_class(), error.Get_error_string().strip()
        start = f"{self.watch.doing} on rank {me}"
        if kind == mpi.ERR_TRUNCATE:
            return CollectiveMismatch(
                f"{start}: another rank has sent more bytes than this one expects\n"
                f"  MPI says: {words}\n"
                "  HINT: UNISONO_CHECK=1 names the first call in which ranks disagree"
            )
        if kind in [getattr(mpi, name, None) for name in _LOST]:
            return RankFailed(
                f"{start} broke off: another rank of the group has gone\n  MPI says: {words}"
            )
        return UnisonoError(f"{start} failed\n  MPI says: {words} (class {kind})")


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
        channel: the group's channel.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self._under_way: list[Transfer] = []

    @property
    def under_way(self) -> int:
        """How many messages have not ended."""
        return len(self._under_way)

    def post_send(self, dst: int, tag: int, x: Tensor) -> Transfer:
        """Start to send `x` to rank `dst`."""
        return self._post(Transfer(x, dst, tag, False), self._channel.comm.Isend, dst)

    def post_recv(self, src: int | None, tag: int, x: Tensor) -> Transfer:
        """Start to receive `x` from rank `src`, or from anybody."""
        channel = self._channel
        if src is None and nbytes_of(x) > channel.chunk_bytes:
            raise UnisonoError.because(
                "a receive from anybody",
                f"{nbytes_of(x)} bytes, which travel in several messages",
                f"{nbytes_of(x)} > {channel.chunk_bytes}",
                "name the source",
            )
        source = channel.mpi.ANY_SOURCE if src is None else src
        return self._post(Transfer(x, src, tag, True), channel.comm.Irecv, source)

    def _post(self, transfer: Transfer, call: Any, peer: int) -> Transfer:
        channel, x = self._channel, transfer.tensor
        wire_tag = self._wire_tag(transfer.tag)
        pieces = list(channel.pieces(nbytes_of(x))) or [(0, 0)]
        with self._lock:
            for begin, length in pieces:
                memory = channel.mpi.buffer.fromaddress(x.data_ptr() + begin, length)
                with channel.threads.lock:
                    request = call([memory, channel.mpi.BYTE], peer, wire_tag)
                transfer.requests.append((request, length))
            self._under_way.append(transfer)
        return transfer

    def _wire_tag(self, tag: int) -> int:
        free = self._channel.max_tag - _RESERVED_TAGS
        if 0 <= tag <= free:
            return tag
        if tag == EXCHANGE_TAG:  # an MPI with few tags
            return self._channel.max_tag - 1
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
                    found = status.Get_count(mpi.BYTE)
                    if found != expected and transfer.error is None:
                        transfer.error = self._wrong(transfer, found)
        except mpi.Exception as error:
            abandon(transfer.tensor, transfer.requests)  # later pieces may still arrive in it
            transfer.requests = []
            is_long = error.Get_error_class() == mpi.ERR_TRUNCATE and transfer.peer is not None
            transfer.error = (
                self._wrong(transfer, None) if is_long else self._channel.translated(error)
            )
        transfer.is_done = True

    def _wrong(self, transfer: Transfer, found: int | None) -> UnisonoError:
        """Return the error for a message of another length; None is one that is too long."""
        sender = -1 if transfer.peer is None else self._channel.watch.ranks[transfer.peer]
        return wrong_message(transfer.tensor, sender, found, transfer.tag)

    def wait(self, transfers: Sequence[Transfer], timeout_s: float) -> None:
        """Wait for messages; raises what went wrong with one of them."""
        self.progress()
        waiting = [transfer for transfer in transfers if not transfer.is_done]
        if waiting:
            began = time.perf_counter_ns()
            peers = sorted({t.peer for t in waiting if t.peer is not None})
            nbytes = sum(nbytes_of(transfer.tensor) for transfer in waiting)
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
        with self._lock:
            for transfer in self._under_way:
                for request, _ in transfer.requests:
                    if transfer.is_receive:
                        self._cancel(request)
                abandon(transfer)
            self._under_way = []

    def _cancel(self, request: Any) -> None:
        with self._channel.threads.lock:
            try:
                request.Cancel()
                request.Test()
            except self._channel.mpi.Exception:
                return  # it stays as it is, and so does its memory
