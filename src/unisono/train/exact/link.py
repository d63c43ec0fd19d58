"""The way from a member to its coordinator and to the memory that members share.

In a process on its own the coordinator lives here; in an elastic job, beside the supervisor: what
a member says goes to its parent by the pipe for news, and orders come back with all other orders.
"""

from __future__ import annotations

import mmap
import os
import queue
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.comm.engines import core
from unisono.errors import PlatformError, RankFailed
from unisono.launch.context import here
from unisono.launch.elastic.coordinator import LINE, MOST, Coordinator, Follower
from unisono.launch.pool.protocol import tell
from unisono.train.exact.peers import Peers, Ranges, Unreachable

WELCOME_S = 60.0
"""Longest wait for the answer of the coordinator to a newcomer."""
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


class ElasticLink:
    """What a member needs of the others; this one is for a world of one.

    Attributes:
        follower: knows what is next.
    """

    def __init__(self) -> None:
        self.follower = Follower()
        self._board = torch.empty(0, dtype=torch.uint8)
        self._lines = memoryview(b"")
        self._coordinator = Coordinator(1)

    def join(self, facts: dict[str, Any], size: int, shards: int, step: int) -> None:
        """Become a newcomer.

        Args:
            facts: what must be equal on all members.
            size: bytes of the board.
            shards: of each step.
            step: where the state of this member is.
        """
        del facts
        self._take_board(torch.empty(size, dtype=torch.uint8))
        self._coordinator.joined(0, rank=0, shards=shards, step=step)
        self._listen(blocks=False)

    def tell(self, kind: str, **rest: Any) -> None:
        """Tell the coordinator something."""
        self._coordinator.receive(0, {"kind": kind, **rest})
        self._listen(blocks=False)

    def order(self) -> dict[str, Any]:
        """Wait for the next order. A member that keeps others waiting too long is ended."""
        while not self.follower.orders:
            self._listen(blocks=True)
        return self.follower.orders.pop(0)

    def next(self) -> str:
        """Wait until there is something to do, and return what; see `Follower.due`."""
        follower, began = self.follower, time.perf_counter()
        while True:
            due = follower.due(self._marks)
            if due == "held":
                self._part()
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
        self._listen(blocks=False)
        return self.follower.is_in_vain()

    def show(self, what: str, word: int | None = None) -> None:
        """Let others see that `what` is done, and a word about this step besides.

        What is confirmed has no new word: a member that does not get it must end with the same.
        """
        follower = self.follower
        line = follower.order["place"] * _WORDS
        if word is not None:
            self._lines[line + 1 + follower.step % 2] = word
        follower.has_done(what)
        _keep_order()
        self._lines[line] = follower.mark

    def words(self) -> list[int]:
        """Return what all members have said about this step."""
        count = len(self.follower.order["ranks"])
        return [self._lines[n * _WORDS + 1 + self.follower.step % 2] for n in range(count)]

    def view(self, begin: int, end: int) -> Tensor:
        """Return bytes of the board, to read and to write."""
        return self._board[begin:end]

    def publish(self, ranges: Ranges) -> None:
        """Let members of other hosts see what was written; raises `InVain`."""

    def put_state(self, data: bytes) -> None:
        """Leave a state for newcomers."""

    def get_state(self, order: dict[str, Any]) -> bytes | None:
        """Return the state that a member has left; None if it is gone, and the state with it."""
        return bytes(order["bytes"])

    def close(self) -> None:
        """Let go."""

    def _take_board(self, board: Tensor) -> None:
        self._board, self._lines = board, board[: MOST * LINE].numpy().data.cast("q")

    def _marks(self) -> list[int]:
        """Return the marks of all members, by their places."""
        return [self._lines[n * _WORDS] for n in range(len(self.follower.order["ranks"]))]

    def _listen(self, *, blocks: bool) -> None:
        """Take orders that have come; `blocks` waits for one."""
        orders = self._coordinator.take_orders()
        if blocks and not orders:
            raise RankFailed("a member on its own waits for an order")
        self.follower.orders += [order for _, order in orders]

    def _meet(self) -> bool:
        """Be connected to the members of this epoch; returns whether that is so."""
        return True

    def _part(self) -> None:
        """Let nothing of this epoch arrive any more."""

    def _pause(self, waited_s: float) -> None:
        """Wait a moment for marks and orders."""


class MemberLink(ElasticLink):
    """A member of a job: its parent carries its words, memory of this host the rest.

    Args:
        report_fd: the pipe to its parent.
        orders: where orders for it arrive.
        files: the board and the state, which members of this host share.
    """

    def __init__(
        self, report_fd: int, orders: queue.SimpleQueue[dict[str, Any]], files: Sequence[int]
    ) -> None:
        super().__init__()
        self._report_fd, self._orders = report_fd, orders
        self._board_fd, self._state_fd = files
        self._host = ""
        self._peers: Peers | None = None
        self._met = 0
        """The epoch of the connections to other hosts."""
        self._is_parted = False
        self._reported_mark, self._tell_at = 0, 0.0

    def join(self, facts: dict[str, Any], size: int, shards: int, step: int) -> None:
        """Become a newcomer."""
        self.tell("join", facts=facts, pid=os.getpid(), host=socket.gethostname())
        self._listen(blocks=True, timeout_s=WELCOME_S)
        if not self.follower.orders:
            raise RankFailed(f"no answer of the coordinator within {WELCOME_S:g} s")
        answer = self.follower.orders.pop(0)
        if answer["kind"] == "refused":
            raise PlatformError.because(
                "a rank joins an elastic training",
                f"its results would have other bits than those of the members\n{answer['why']}",
                hint="on all ranks the same data (one seed, one file), arguments, threads, torch "
                "and kind of CPU",
            )
        self._host = answer["host"]
        if os.fstat(self._board_fd).st_size < size:
            os.ftruncate(self._board_fd, size)
        board = torch.frombuffer(mmap.mmap(self._board_fd, size), dtype=torch.uint8)
        self._take_board(board)
        if answer["key"]:
            key = bytes.fromhex(answer["key"])
            self._peers = Peers(key, board.numpy().data, self._put_mark, self._state_fd)
        address = None if self._peers is None else self._peers.address
        self.tell("enter", shards=shards, step=step, address=address)

    def tell(self, kind: str, **rest: Any) -> None:
        """Tell the coordinator something."""
        tell(self._report_fd, elastic={"kind": kind, **rest})

    def _listen(self, *, blocks: bool, timeout_s: float | None = None) -> None:
        while True:
            try:
                order = self._orders.get(blocks, timeout_s)
            except queue.Empty:
                return
            # Another process may have died in this place, and what was for it comes too late.
            if order["pid"] == os.getpid():
                self.follower.orders.append(order)
                blocks = False

    def _pause(self, waited_s: float) -> None:
        follower = self.follower
        if waited_s < _AWAKE_S:
            os.sched_yield()
        elif follower.is_held:
            self._listen(blocks=True)
            return
        else:
            time.sleep(min(waited_s / 8, _NAP_S))
            if self._reported_mark != follower.mark:
                self._tell_mark()
        if self._peers is not None and self._peers.is_broken:
            self._tell_parted("a connection between members has ended")
        self._listen(blocks=False)

    def _tell_mark(self) -> None:
        if (now := time.monotonic()) > self._tell_at:
            self._reported_mark, self._tell_at = self.follower.mark, now + _TELL_S
            self.tell("mark", mark=self._reported_mark)

    # Members of other hosts.

    def _meet(self) -> bool:
        order, peers = self.follower.order, self._peers
        if peers is None or not self.follower.is_spread:
            return True
        if self._met != order["epoch"]:
            self._met, self._is_parted = order["epoch"], False
            try:
                peers.meet(order, self.is_disturbed)
            except Unreachable as error:
                self._tell_parted(str(error))
        return not self._is_parted

    def _part(self) -> None:
        if self._peers is not None:
            self._peers.part()

    def _tell_parted(self, why: str) -> None:
        """Tell the coordinator, once in each epoch; it has all begin the step again."""
        if not self._is_parted:
            self._is_parted = True
            ranks, place = self.follower.order["ranks"], self.follower.order["place"]
            message = f"rank {ranks[place]} on {socket.gethostname()} and others: {why}"
            self.tell("parted", epoch=self.follower.order["epoch"], why=message)

    def _push(self, send: Callable[[Peers], None]) -> None:
        peers = self._peers
        if peers is None or not self.follower.is_spread:
            return
        try:
            send(peers)
        except Unreachable as error:
            if not self.is_disturbed():
                self._tell_parted(str(error))
            raise InVain from None

    def publish(self, ranges: Ranges) -> None:
        """Let members of other hosts see what was written; raises `InVain`."""
        self._push(lambda peers: peers.push(ranges, self.is_disturbed))

    def show(self, what: str, word: int | None = None) -> None:
        """Let others see that `what` is done, and a word about this step besides."""
        super().show(what, word)
        at = self.follower.order["place"] * _WORDS
        line = self._lines[at : at + 3].tolist()
        self._push(lambda peers: peers.push_mark(line, self.is_disturbed))
        self._tell_mark()

    def _put_mark(self, place: int, mark: int, *words: int) -> None:
        """Write what another host says of a member; what it wrote before is there already."""
        at = place * _WORDS
        for number, word in enumerate(words, 1):
            self._lines[at + number] = word
        _keep_order()
        self._lines[at] = mark

    # The state, for newcomers.

    def put_state(self, data: bytes) -> None:
        """Leave a state for newcomers."""
        view, begin = memoryview(data), 0
        while view:
            count = os.pwrite(self._state_fd, view, begin)
            view, begin = view[count:], begin + count

    def get_state(self, order: dict[str, Any]) -> bytes | None:
        """Return the state that a member has left; None if it is gone, and the state with it."""
        if order["host"] == self._host or self._peers is None:
            return os.pread(self._state_fd, order["bytes"], 0)
        try:
            return self._peers.fetch_state(order["address"], order["bytes"])
        except Unreachable:
            return None

    def close(self) -> None:
        """Let go."""
        if self._peers is not None:
            self._peers.close()
            self._peers = None


_has_joined = False


def is_member() -> bool:
    """Whether this process is a rank of an elastic job."""
    place = here()
    return place is not None and bool(place.shared_fds)


def open_link() -> ElasticLink:
    """Return the way to the members of this job; a world of one without such a job."""
    global _has_joined
    place = here()
    if place is None or not place.shared_fds or place.orders is None or place.report_fd is None:
        return ElasticLink()
    if _has_joined:
        raise PlatformError.because(
            "a second elastic training in one elastic job",
            "a rank that joins later could not tell which of the two it is for",
            hint="one unisono.run(..., elastic=True) for each",
        )
    _has_joined = True
    return MemberLink(place.report_fd, place.orders, place.shared_fds)
