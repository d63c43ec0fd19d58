"""The way from a member to its coordinator and to the memory that members share.

In a process on its own the coordinator lives here; in an elastic job, in the launcher.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from unisono.comm import seal
from unisono.comm.engines.shm import core
from unisono.errors import PlatformError, RankFailed
from unisono.launch.elastic.coordinator import LINE, LOST, MOST, Coordinator
from unisono.launch.elastic.follower import Follower
from unisono.launch.elastic.hub import BOARD, STATE, notice_loss, send_line
from unisono.launch.pool.protocol import drop_descriptor

VARIABLE = "UNISONO_ELASTIC"
"""Where the coordinator of a job is: `@name` on this host, `host:port` elsewhere."""
HELLO_S = 30.0
_AWAKE_S = 2e-3
"""So long a member waits for others without sleep: to wake up takes about as long."""
_NAP_S = 5e-3
_WORDS = LINE // 8
_keep_order = os.sched_yield if core.unavailable() else core.load().fence
"""What was written or read before it has happened before what comes after; a yield passes a full
barrier in the kernel."""


class Link:
    """What a member needs of the others; this one is for a world of one.

    Attributes:
        follower: knows what is next.
    """

    def __init__(self) -> None:
        self.follower = Follower()
        self._board = torch.empty(0, dtype=torch.uint8)
        self._lines = memoryview(b"")
        self._coordinator = Coordinator(1)

    def join(self, card: dict[str, Any]) -> None:
        """Come in; `card` says what this member is and where its state stands."""
        self._take_board(torch.empty(card["bytes"], dtype=torch.uint8))
        self._coordinator.joined(0, rank=0, shards=card["shards"], step=card["step"])
        self._listen(blocks=False)

    def tell(self, kind: str, **rest: Any) -> None:
        """Tell the coordinator something."""
        self._coordinator.told(0, {"kind": kind, **rest})
        self._listen(blocks=False)

    def order(self) -> dict[str, Any]:
        """Wait for the next order. The coordinator ends whoever keeps others waiting too long."""
        while not self.follower.orders:
            self._listen(blocks=True)
        return self.follower.orders.pop(0)

    def next(self) -> str:
        """Wait until there is something to do, and return what; see `Follower.due`."""
        follower, began = self.follower, time.perf_counter()
        while True:
            due = follower.due(self._marks)
            if due == "held":
                self.tell("held", mark=follower.mark)
            elif due == "mismatch":
                self.tell("mismatch", why=follower.mistake)
            elif due == "wait":
                self._pause(time.perf_counter() - began)
            else:
                _keep_order()
                return due

    def is_disturbed(self) -> bool:
        """Whether an order has come that makes work under way vain."""
        self._listen(blocks=False)
        return self.follower.is_in_vain()

    def show(self, what: str, word: int) -> None:
        """Let others see that `what` is done, and a word about this step besides."""
        at = self.follower.order["place"] * _WORDS
        self._set(at + 1 + self.follower.step % 2, word)
        self.follower.has_done(what)
        _keep_order()
        self._set(at, self.follower.mark)

    def words(self) -> list[int]:
        """Return what all members have said about this step."""
        count = len(self.follower.order["ranks"])
        self.view(0, count * LINE)
        return [self._lines[n * _WORDS + 1 + self.follower.step % 2] for n in range(count)]

    def room(self, begin: int, end: int) -> Tensor:
        """Return bytes of the board to write to."""
        return self._board[begin:end]

    def publish(self, begin: int, end: int) -> None:
        """Let others see what was written there."""

    def view(self, begin: int, end: int) -> Tensor:
        """Return bytes of the board as others have written them."""
        return self._board[begin:end]

    def put_state(self, data: bytes) -> None:
        """Leave a state for newcomers."""

    def get_state(self, size: int) -> bytes:
        """Return the state that a member has left."""
        return bytes(size)

    def close(self) -> None:
        """Let go."""

    def _take_board(self, board: Tensor) -> None:
        self._board, self._lines = board, board[: MOST * LINE].numpy().data.cast("q")

    def _set(self, place: int, word: int) -> None:
        self._lines[place] = word
        self.publish(8 * place, 8 * place + 8)

    def _marks(self) -> list[int]:
        """Return the marks of all members, by their places."""
        return [self._lines[n * _WORDS] for n in range(len(self.follower.order["ranks"]))]

    def _listen(self, *, blocks: bool) -> None:
        """Take orders that have come; `blocks` waits for one."""
        orders = self._coordinator.take_orders()
        if blocks and not orders:
            raise _lost()
        self.follower.orders += [order for _, order in orders]

    def _pause(self, waited_s: float) -> None:
        """Wait a moment for marks and orders."""


class NearLink(Link):
    """A member on the host of its launcher: a socket for words, memory for the rest."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection.connect("\0" + address[1:] if address.startswith("@") else address)
        self._files: list[int] = []
        self._start()

    def _start(self) -> None:
        self._rest = b""
        self._connection.settimeout(HELLO_S)
        self._nonce = str(self.order()["nonce"])
        self._is_open = True
        # A worker of a loader that outlives this process must not make it look alive.
        os.register_at_fork(after_in_child=self._part)

    def join(self, card: dict[str, Any]) -> None:
        """Come in."""
        send_line(self._connection, {**card, "kind": "join", "proof": seal.prove(self._nonce)})
        data, self._files, _, _ = socket.recv_fds(self._connection, 1 << 16, 2)
        self._feed(data)
        self._welcome(self.order())
        memory = mmap.mmap(self._files[BOARD], card["bytes"])
        self._take_board(torch.frombuffer(memory, dtype=torch.uint8))

    def _welcome(self, answer: dict[str, Any]) -> int:
        if answer["kind"] == "refused":
            raise PlatformError.because(
                "a rank joins an elastic training",
                f"its results would have other bits than those of the members\n{answer['why']}",
                hint="the same arguments, threads, torch and kind of CPU on all ranks",
            )
        self._connection.settimeout(None)
        return answer["number"]

    def tell(self, kind: str, **rest: Any) -> None:
        """Tell the coordinator something."""
        with _or_lost():
            send_line(self._connection, {"kind": kind, **rest})

    def _listen(self, *, blocks: bool) -> None:
        try:
            data = self._connection.recv(1 << 16, 0 if blocks else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            raise _lost()
        self._feed(data)

    def _feed(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        self.follower.orders += [json.loads(line) for line in lines]

    def _pause(self, waited_s: float) -> None:
        if waited_s < _AWAKE_S:
            os.sched_yield()
        elif not self.follower.is_held:
            time.sleep(min(waited_s / 8, _NAP_S))
        self._listen(blocks=self.follower.is_held)

    def put_state(self, data: bytes) -> None:
        """Leave a state for newcomers."""
        self._write(STATE, memoryview(data), 0)

    def get_state(self, size: int) -> bytes:
        """Return the state that a member has left."""
        data = bytearray(size)
        self._read_into(STATE, memoryview(data), 0)
        return bytes(data)

    def _write(self, file: int, data: memoryview, begin: int) -> None:
        while data:
            count = os.pwrite(self._files[file], data, begin)
            data, begin = data[count:], begin + count

    def _read_into(self, file: int, data: memoryview, begin: int) -> None:
        while data:
            count = os.preadv(self._files[file], [data], begin)
            if not count:
                raise _lost()
            data, begin = data[count:], begin + count

    def close(self) -> None:
        """Let go."""
        if self._is_open:
            self._is_open = False
            self._connection.close()
            for fd in self._files:
                os.close(fd)

    def _part(self) -> None:
        """In a process forked from this one."""
        if self._is_open:
            drop_descriptor(self._connection.fileno())


class FarLink(NearLink):
    """A member on another host: a copy of the board here, and what is needed travels."""

    def __init__(self, address: str) -> None:
        Link.__init__(self)
        host, _, port = address.rpartition(":")
        self._address = host.strip("[]"), int(port)
        self._connection = socket.create_connection(self._address, HELLO_S)
        notice_loss(self._connection)
        self._carrier = socket.create_connection(self._address, HELLO_S)
        notice_loss(self._carrier)
        self._stream = self._carrier.makefile("rb")
        self._start()

    def join(self, card: dict[str, Any]) -> None:
        """Come in."""
        send_line(self._connection, {**card, "kind": "join", "proof": seal.prove(self._nonce)})
        number = self._welcome(self.order())
        nonce = json.loads(self._stream.readline())["nonce"]
        hello = {"kind": "carry", "number": number, "proof": seal.prove(nonce)}
        send_line(self._carrier, hello)
        self._carrier.settimeout(None)
        self._take_board(torch.empty(card["bytes"], dtype=torch.uint8))

    def publish(self, begin: int, end: int) -> None:
        """Send what was written there."""
        self._write(BOARD, self._board.numpy().data[begin:end], begin)

    def view(self, begin: int, end: int) -> Tensor:
        """Fetch bytes of the board."""
        self._read_into(BOARD, self._board.numpy().data[begin:end], begin)
        return self._board[begin:end]

    def close(self) -> None:
        """Let go."""
        if self._is_open:
            self._is_open = False
            self._connection.close()
            self._stream.close()
            self._carrier.close()

    def _part(self) -> None:
        super()._part()
        if self._is_open:
            drop_descriptor(self._carrier.fileno())

    def _marks(self) -> list[int]:
        """Ask for the marks; the answer comes once all are as far as ours, or after a moment."""
        follower = self.follower
        count = len(follower.order["ranks"])
        self._ask("marks", BOARD, count=count, mark=follower.mark)
        return json.loads(self._answer())

    def _write(self, file: int, data: memoryview, begin: int) -> None:
        self._ask("write", file, begin=begin, size=len(data), end=begin + len(data))
        with _or_lost():
            self._carrier.sendall(data)
        self._answer()

    def _read_into(self, file: int, data: memoryview, begin: int) -> None:
        self._ask("read", file, begin=begin, size=len(data))
        with _or_lost():
            while data:
                count = self._stream.readinto(data)
                if not count:
                    raise _lost()
                data = data[count:]

    def _ask(self, kind: str, file: int, **rest: int) -> None:
        with _or_lost():
            send_line(self._carrier, {"kind": kind, "file": file, **rest})

    def _answer(self) -> bytes:
        with _or_lost():
            line = self._stream.readline()
        if not line:
            raise _lost()
        return line


_has_joined = False


def open_link() -> Link:
    """Return the way to the members of this job; a world of one without such a job."""
    global _has_joined
    address = os.environ.get(VARIABLE)
    if address is None:
        return Link()
    if _has_joined:
        raise PlatformError.because(
            "a second elastic training in one elastic job",
            "a rank that joins later could not tell which of the two it is for",
            hint="one unisono.run(..., elastic=True) for each",
        )
    _has_joined = True
    is_near = address.startswith(("@", "/"))
    return NearLink(address) if is_near else FarLink(address)


def _lost() -> RankFailed:
    return RankFailed(LOST)


@contextmanager
def _or_lost() -> Iterator[None]:
    try:
        yield
    except OSError:
        raise _lost() from None
