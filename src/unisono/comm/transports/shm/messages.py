"""Point-to-point messages of one rank: matched by tag, in order, without a thread of their own.

Transfers under way are moved on by whoever waits: for a message, for a collective, or the group's
background thread when nobody else does. A message nobody has asked for stays in its ring, unless
one behind it is wanted; then it is put aside.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.comm.headers import DTYPE_NUMBERS, DTYPES
from unisono.comm.transports.shm.control import Control
from unisono.comm.transports.shm.layout import CELLS, DOORBELL, DOORBELL_WANTED
from unisono.comm.transports.shm.libc import Timespec, futex_wait, has_futex, memmove, sched_yield
from unisono.comm.transports.shm.rings import Fragment, Reader, Writer
from unisono.comm.transports.shm.waiting import cores
from unisono.comm.transports.shm.watch import Watch
from unisono.comm.transports.staging import wrong_message

_SPINS = 50
_YIELD_S = 1e-3
_FIRST_NAP_S = 20e-6
_LAST_NAP_S = 1e-3


class Transfer:
    """A message under way, from this rank or to it.

    Attributes:
        peer: the other rank; None for a receive from anybody, until a message came.
        done: whether it is complete on this rank (or has failed).
        error: why it failed.
    """

    __slots__ = ("done", "dtype", "error", "moved", "nbytes", "peer", "pointer", "tag", "tensor")

    def __init__(self, peer: int | None, tag: int, tensor: Tensor) -> None:
        self.peer = peer
        self.tag = tag
        self.nbytes = tensor.numel() * tensor.element_size()
        self.dtype = DTYPE_NUMBERS.get(tensor.dtype, -1)
        self.pointer = tensor.data_ptr()
        self.moved = 0
        self.done = False
        self.error: BaseException | None = None
        self.tensor = tensor  # kept alive until the end


class _Arriving:
    """A message whose first fragment was read: where the rest goes (nowhere, if refused)."""

    __slots__ = ("dtype", "moved", "nbytes", "store", "tag", "transfer")

    def __init__(self, fragment: Fragment, transfer: Transfer | None, *, put_aside: bool) -> None:
        self.tag = fragment.tag
        self.nbytes = fragment.nbytes
        self.dtype = fragment.dtype
        self.transfer = transfer
        self.moved = 0
        self.store = torch.empty(self.nbytes, dtype=torch.uint8) if put_aside else None


class Messages:
    """The messages of one rank of a segment.

    Args:
        control: control blocks of the segment.
        watch: judge of the peers.
        semaphores: whether rings are guarded by semaphores.
    """

    def __init__(self, control: Control, watch: Watch, *, semaphores: bool) -> None:
        self._control = control
        self._watch = watch
        self._semaphores = semaphores
        self._peers = [r for r in range(control.size) if r != control.rank]
        self._lock = threading.Lock()
        self._outgoing: dict[int, deque[Transfer]] = {}
        self._expected: list[Transfer] = []
        self._arriving: dict[int, _Arriving] = {}
        self._aside: dict[int, list[_Arriving]] = {}
        self._writers: dict[int, Writer] = {}
        self._readers: dict[int, Reader] = {}
        self._attended = 0
        self._spins = _SPINS if control.size <= cores() else 0
        self._bell = control.layout.control_word(control.rank, DOORBELL)
        self._bell_wanted = control.layout.control_word(control.rank, DOORBELL_WANTED)
        self._bell_address = control.word_address(control.rank, DOORBELL)
        self.under_way = 0
        """Transfers posted and not complete."""
        self.waited_ns = 0
        """Time spent in waits so far."""

    @property
    def needs_background(self) -> bool:
        """Whether transfers are under way that nobody waits for."""
        return self.under_way > 0 and not self._attended

    @property
    def overflows(self) -> bool:
        """Whether messages under way may be more than rings hold: then a peer waits for this rank.

        Where they are not, the peer is done with them whatever this rank does meanwhile.
        """
        if self._arriving or any(self._outgoing.values()):
            return True
        cell_bytes = self._control.layout.cell_bytes
        return sum(-(-t.nbytes // cell_bytes) for t in list(self._expected)) > CELLS

    def post_send(self, dst: int, tag: int, x: Tensor) -> Transfer:
        """Send the bytes of `x` to `dst`."""
        transfer = Transfer(dst, tag, x)
        with self._lock:
            if dst not in self._writers:
                self._writers[dst] = Writer(self._control, dst, semaphores=self._semaphores)
            self._outgoing.setdefault(dst, deque()).append(transfer)
            self.under_way += 1
        return transfer

    def post_recv(self, src: int | None, tag: int, x: Tensor) -> Transfer:
        """Receive the next message with `tag` from `src` (None: from anybody) into `x`."""
        transfer = Transfer(src, tag, x)
        with self._lock:
            for peer in self._peers if src is None else (src,):
                if peer not in self._readers:
                    self._readers[peer] = Reader(self._control, peer, semaphores=self._semaphores)
            self.under_way += 1
            if not self._take_from_aside(transfer):
                self._expected.append(transfer)
        return transfer

    def progress(self) -> bool:
        """Move on what can be moved; return whether anything was. Never blocks."""
        if not self.under_way or not self._lock.acquire(blocking=False):
            return False
        try:
            moved = False
            for dst, queue in self._outgoing.items():
                if queue and self._push(self._writers[dst], queue):
                    moved = True
            if self._expected or self._arriving:
                for src, reader in self._readers.items():
                    if self._pull(src, reader):
                        moved = True
            return moved
        finally:
            self._lock.release()

    def wait(self, transfers: Sequence[Transfer], timeout_s: float) -> None:
        """Move things on until all `transfers` are complete.

        Raises:
            RankFailed: a peer is gone.
            RankTimeout: the deadline passed.
            CollectiveMismatch: a message has another length or dtype than its receiver expects.
        """
        self._attended += 1
        try:
            if not self._try(transfers):
                before = time.perf_counter_ns()
                self._climb(transfers, timeout_s)
                self.waited_ns += time.perf_counter_ns() - before
        finally:
            self._attended -= 1
        for transfer in transfers:
            if transfer.error is not None:
                raise transfer.error

    def release(self) -> None:
        """Forget everything; the segment is about to go."""
        with self._lock:
            self.under_way = 0
            for store in (self._outgoing, self._arriving, self._aside):
                store.clear()
            self._expected.clear()
            self._writers.clear()
            self._readers.clear()

    def _try(self, transfers: Sequence[Transfer]) -> bool:
        self.progress()
        return all(transfer.done for transfer in transfers)

    def _climb(self, transfers: Sequence[Transfer], timeout_s: float) -> None:
        words, nap, nap_s = self._control.words, Timespec(), _FIRST_NAP_S
        spins, yield_until = self._spins, time.monotonic() + _YIELD_S
        vigil = self._watch.begin(timeout_s)
        while True:
            bell = words[self._bell]
            moved = self.progress()
            if all(transfer.done for transfer in transfers):
                return
            if moved:
                spins, yield_until = self._spins, time.monotonic() + _YIELD_S
                nap_s = _FIRST_NAP_S
            elif spins:
                spins -= 1
            elif time.monotonic() < yield_until:
                sched_yield()
            else:
                words[self._bell_wanted] = 1
                if words[self._bell] == bell:
                    if has_futex():
                        nap.set(nap_s)
                        futex_wait(self._bell_address, bell, nap)
                    else:
                        time.sleep(nap_s)
                nap_s = min(nap_s * 1.5, _LAST_NAP_S)
                vigil.look(lambda: self._absent(transfers))

    def _absent(self, transfers: Sequence[Transfer]) -> list[int]:
        """Return whom the unfinished transfers wait for."""
        absent: set[int] = set()
        for transfer in transfers:
            if not transfer.done:
                absent.update(self._peers if transfer.peer is None else (transfer.peer,))
        return sorted(absent)

    def _push(self, writer: Writer, queue: deque[Transfer]) -> bool:
        moved = False
        while queue and writer.can_write():
            transfer = queue[0]
            length = min(writer.cell_bytes, transfer.nbytes - transfer.moved)
            writer.write(
                Fragment(transfer.tag, transfer.nbytes, transfer.moved, length, transfer.dtype),
                transfer.pointer + transfer.moved,
            )
            transfer.moved += length
            moved = True
            if transfer.moved == transfer.nbytes:
                queue.popleft()
                self._finish(transfer)
        return moved

    def _pull(self, src: int, reader: Reader) -> bool:
        moved = False
        while reader.can_read():
            fragment = reader.peek()
            if fragment.offset == 0 and src not in self._arriving:
                transfer = self._match(src, fragment.tag)
                if transfer is None and not self._is_wanted(src):
                    break  # nobody waits for this rank: leave the message where it is
                put_aside = transfer is None
                if transfer is not None:
                    transfer.peer = src
                    if transfer.nbytes != fragment.nbytes or transfer.dtype != fragment.dtype:
                        self._refuse(transfer, fragment)
                        transfer = None
                self._arriving[src] = _Arriving(fragment, transfer, put_aside=put_aside)
            self._take(src, reader, fragment)
            moved = True
        return moved

    def _take(self, src: int, reader: Reader, fragment: Fragment) -> None:
        arriving = self._arriving[src]
        if arriving.transfer is not None:
            reader.take(fragment.length, arriving.transfer.pointer + fragment.offset)
        elif arriving.store is not None:
            reader.take(fragment.length, arriving.store.data_ptr() + fragment.offset)
        else:
            reader.take(fragment.length, None)
        arriving.moved += fragment.length
        if arriving.moved == arriving.nbytes:
            del self._arriving[src]
            if arriving.transfer is not None:
                self._finish(arriving.transfer)
            elif arriving.store is not None:
                self._aside.setdefault(src, []).append(arriving)
                self._offer_aside(src)

    def _match(self, src: int, tag: int) -> Transfer | None:
        """Return the oldest receive that takes a message of this tag from this rank."""
        for place, transfer in enumerate(self._expected):
            if transfer.tag == tag and transfer.peer in (None, src):
                return self._expected.pop(place)
        return None

    def _is_wanted(self, src: int) -> bool:
        return any(transfer.peer in (None, src) for transfer in self._expected)

    def _offer_aside(self, src: int) -> None:
        """A receive may have been posted while the message was being put aside."""
        newest = self._aside[src][-1]
        transfer = self._match(src, newest.tag)
        if transfer is not None:
            self._aside[src].pop()
            self._deliver(newest, transfer, src)

    def _take_from_aside(self, transfer: Transfer) -> bool:
        for src in self._peers if transfer.peer is None else (transfer.peer,):
            waiting = self._aside.get(src, [])
            for place, message in enumerate(waiting):
                if message.tag == transfer.tag:
                    self._deliver(waiting.pop(place), transfer, src)
                    return True
        return False

    def _deliver(self, message: _Arriving, transfer: Transfer, src: int) -> None:
        transfer.peer = src
        if message.nbytes != transfer.nbytes or message.dtype != transfer.dtype:
            self._refuse(transfer, message)
            return
        if message.store is not None:
            memmove(transfer.pointer, message.store.data_ptr(), message.nbytes)
        self._finish(transfer)

    def _refuse(self, transfer: Transfer, message: Fragment | _Arriving) -> None:
        sender = -1 if transfer.peer is None else self._watch.ranks[transfer.peer]
        sent = DTYPES[message.dtype] if message.dtype >= 0 else None
        transfer.error = wrong_message(transfer.tensor, sender, message.nbytes, message.tag, sent)
        self._finish(transfer)

    def _finish(self, transfer: Transfer) -> None:
        transfer.done = True
        self.under_way -= 1
