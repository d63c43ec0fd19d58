"""The way from a member to its coordinator and to the memory that members share.

In a process on its own the coordinator is here; in an elastic job, beside the supervisor: messages
of a member go to its parent by the pipe for news, and orders come back with all other orders.
"""

from __future__ import annotations

import mmap
import os
import queue
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from unisono.comm import seal
from unisono.comm.engines import core
from unisono.errors import PlatformError, RankFailed
from unisono.launch.context import here
from unisono.launch.elastic.coordinator import LINE, MOST, Coordinator, Follower
from unisono.launch.pool.protocol import tell
from unisono.train.exact.peers import Peers, Ranges, Unreachable

_AWAKE_S = 2e-3
"""So long a member waits for others without sleep: to wake up takes about as long."""
_NAP_S = 5e-3
_TELL_S = 0.1
"""Shortest time between two marks that are sent to the coordinator; others see them at once."""
_WORDS = LINE // 8
_keep_order = os.sched_yield if core.unavailable() else core.load().fence
"""What was written or read before it has happened before what comes after; a yield passes a full
barrier in the kernel."""


class InVain(Exception):
    """The members have changed: the step will be begun again."""


class _Transport(Protocol):
    """Messages to a coordinator, and its orders."""

    def send(self, message: dict[str, Any]) -> None:
        """Send a message."""

    def receive(self, *, blocks: bool) -> list[dict[str, Any]]:
        """Return the orders that have come; `blocks` waits for one."""
        ...


class _LocalTransport:
    """A coordinator in this process, of a world of one."""

    def __init__(self) -> None:
        self._coordinator = Coordinator(1)

    def send(self, message: dict[str, Any]) -> None:
        if message["kind"] == "join":
            place = {name: message[name] for name in ("shards", "step")}
            self._coordinator.joined(0, rank=0, **place)
        else:
            self._coordinator.receive(0, message)

    def receive(self, *, blocks: bool) -> list[dict[str, Any]]:
        orders = [order for _, order in self._coordinator.take_orders()]
        if blocks and not orders:
            raise RankFailed("a member on its own waits for an order")
        return orders


class _PipeTransport:
    """The coordinator of a job, beyond the parent of this process."""

    def __init__(self, report_fd: int, orders: queue.SimpleQueue[dict[str, Any]]) -> None:
        self._report_fd, self._orders = report_fd, orders

    def send(self, message: dict[str, Any]) -> None:
        tell(self._report_fd, elastic=message)

    def receive(self, *, blocks: bool) -> list[dict[str, Any]]:
        orders: list[dict[str, Any]] = []
        while True:
            try:
                order = self._orders.get(blocks and not orders)
            except queue.Empty:
                return orders
            # Another process may have died in this place, and what was for it comes too late.
            if order["pid"] == os.getpid():
                orders.append(order)


class ElasticLink:
    """What a member needs of the others.

    Args:
        transport: to the coordinator.
        files: the board and the state, which members share; none in a world of one.
        is_apart: whether each member has such files of its own, so that sums have to travel.

    Attributes:
        follower: knows what is next.
    """

    def __init__(
        self, transport: _Transport, files: Sequence[int] = (), *, is_apart: bool = False
    ) -> None:
        self.follower = Follower()
        self._transport, self._files, self._is_apart = transport, files, is_apart
        self._board = torch.empty(0, dtype=torch.uint8)
        self._lines = memoryview(b"")
        self._peers: Peers | None = None
        self._epoch = 0
        """The epoch of the connections to other members."""
        self._is_parted = False
        self._reported_mark, self._tell_at = 0, 0.0

    def join(self, facts: dict[str, Any], size: int, shards: int, step: int) -> None:
        """Become a newcomer.

        Args:
            facts: what must be equal on all members.
            size: bytes of the board.
            shards: of each step.
            step: where the state of this member is.
        """
        if self._files:
            if os.fstat(self._files[0]).st_size < size:
                os.ftruncate(self._files[0], size)
            memory = mmap.mmap(self._files[0], size)
            self._board = torch.frombuffer(memory, dtype=torch.uint8)
        else:
            self._board = torch.empty(size, dtype=torch.uint8)
        board = self._board.numpy().data
        self._lines = board[: MOST * LINE].cast("q")
        address = None
        if self._is_apart:
            key = seal.prove("members of an elastic training").encode()
            self._peers = Peers(key, board, self._put_mark, self._files[1])
            address = self._peers.address
        process = {"pid": os.getpid(), "host": socket.gethostname(), "address": address}
        self.tell("join", facts=facts, shards=shards, step=step, **process)

    def tell(self, kind: str, **rest: Any) -> None:
        """Tell the coordinator something."""
        self._transport.send({"kind": kind, **rest})

    def order(self) -> dict[str, Any]:
        """Wait for the next order. A member that keeps others waiting too long is ended."""
        if not self.follower.orders:
            self._listen(blocks=True)
        order = self.follower.orders.pop(0)
        if order["kind"] == "refused":
            raise PlatformError.because(
                "a rank joins an elastic training",
                f"its results would have other bits than those of the members\n{order['why']}",
                hint="on all ranks the same data (one seed, one file), arguments, threads, torch "
                "and kind of CPU",
            )
        return order

    def next(self) -> str:
        """Wait until there is something to do, and return what; see `Follower.due`."""
        follower, began = self.follower, time.perf_counter()
        self._listen()
        while True:
            due = follower.due(self._marks)
            if due == "held":
                if self._peers is not None:
                    self._peers.part()
                self.tell("held", step=follower.step)
            elif due == "mismatch":
                self.tell("mismatch", why=follower.mistake)
            elif due == "wait" or (due in ("compute", "reduce", "confirm") and not self._meet()):
                self._pause(time.perf_counter() - began)
            else:
                _keep_order()
                return due

    def is_disturbed(self) -> bool:
        """Whether an order has come that makes work under way vain."""
        self._listen()
        return self.follower.is_in_vain()

    def show(self, what: str, word: int | None = None) -> None:
        """Let others see that `what` is done, and a word about this step besides.

        What is confirmed has no new word: a member that does not get it must end with the same.
        """
        follower = self.follower
        place = follower.order["place"]
        words = self._lines[place * _WORDS + 1 : place * _WORDS + 3].tolist()
        if word is not None:
            words[follower.step % 2] = word
        follower.has_done(what)
        self._put_mark(place, follower.mark, *words)
        line = [follower.mark, *words]
        self._push(lambda peers: peers.push_mark(line, self.is_disturbed))
        if follower.is_at_end:
            self._tell_mark()

    def words(self) -> list[int]:
        """Return what all members have said about this step."""
        count = len(self.follower.order["ranks"])
        return [self._lines[n * _WORDS + 1 + self.follower.step % 2] for n in range(count)]

    def view(self, begin: int, end: int) -> Tensor:
        """Return bytes of the board, to read and to write."""
        return self._board[begin:end]

    def publish(self, ranges: Ranges) -> None:
        """Send what was written to members with memory of their own; raises `InVain`."""
        self._push(lambda peers: peers.push(ranges, self.is_disturbed))

    def put_state(self, data: bytes) -> None:
        """Leave a state for newcomers."""
        view, begin = memoryview(data), 0
        while view:
            count = os.pwrite(self._files[1], view, begin)
            view, begin = view[count:], begin + count

    def get_state(self, order: dict[str, Any]) -> bytes | None:
        """Return the state that a member has left; None if it is gone, and the state with it."""
        if self._peers is None:
            return os.pread(self._files[1], order["bytes"], 0)
        try:
            return self._peers.fetch_state(order["address"], order["bytes"])
        except Unreachable:
            return None

    def close(self) -> None:
        """Let go."""
        if self._peers is not None:
            self._peers.close()
            self._peers = None

    def _put_mark(self, place: int, mark: int, *words: int) -> None:
        """Write the mark of a member, and its words before it."""
        at = place * _WORDS
        for number, word in enumerate(words, 1):
            self._lines[at + number] = word
        _keep_order()
        self._lines[at] = mark

    def _marks(self) -> list[int]:
        """Return the marks of all members, by their places."""
        return [self._lines[n * _WORDS] for n in range(len(self.follower.order["ranks"]))]

    def _listen(self, *, blocks: bool = False) -> None:
        self.follower.orders += self._transport.receive(blocks=blocks)

    def _pause(self, waited_s: float) -> None:
        """Wait a moment for marks and orders."""
        if waited_s < _AWAKE_S:
            os.sched_yield()
        elif self.follower.is_held:
            self._listen(blocks=True)
            return
        else:
            time.sleep(min(waited_s / 8, _NAP_S))
            self._tell_mark()
        if self._peers is not None and self._peers.is_broken:
            self._tell_parted("a connection between members has ended")
        self._listen()

    def _tell_mark(self) -> None:
        mark, now = self.follower.mark, time.monotonic()
        if mark != self._reported_mark and now > self._tell_at:
            self._reported_mark, self._tell_at = mark, now + _TELL_S
            self.tell("mark", mark=mark)

    # Members with memory of their own.

    def _meet(self) -> bool:
        """Be connected to the members of this epoch; return whether that is so."""
        order = self.follower.order
        if self._peers is None or not self.follower.is_spread:
            return True
        if self._epoch != order["epoch"]:
            self._epoch, self._is_parted = order["epoch"], False
            try:
                self._peers.meet(order, self.is_disturbed)
            except Unreachable as error:
                self._tell_parted(str(error))
        return not self._is_parted

    def _push(self, send: Callable[[Peers], None]) -> None:
        if self._peers is None or not self.follower.is_spread:
            return
        try:
            send(self._peers)
        except Unreachable as error:
            if not self.is_disturbed():
                self._tell_parted(str(error))
            raise InVain from None

    def _tell_parted(self, why: str) -> None:
        """Tell the coordinator, once in each epoch; it has all begin the step again."""
        if not self._is_parted:
            self._is_parted = True
            order = self.follower.order
            rank = order["ranks"][order["place"]]
            message = f"rank {rank} on {socket.gethostname()} and others: {why}"
            self.tell("parted", epoch=order["epoch"], why=message)


_has_joined = False


def is_member() -> bool:
    """Whether this process is a rank of an elastic job."""
    place = here()
    return place is not None and bool(place.shared_fds)


def open_link() -> ElasticLink:
    """Return the way to the members of this job; a world of one without such a job."""
    global _has_joined
    place = here()
    if place is None or place.report_fd is None or place.orders is None or not place.shared_fds:
        return ElasticLink(_LocalTransport())
    if _has_joined:
        raise PlatformError.because(
            "a second elastic training in one elastic job",
            "a rank that joins later could not tell which of the two it is for",
            hint="one unisono.run(..., elastic=True) for each",
        )
    _has_joined = True
    transport = _PipeTransport(place.report_fd, place.orders)
    return ElasticLink(transport, place.shared_fds, is_apart=not place.platform.kind.is_here)
