"""Carries messages and orders between members and the coordinator, and holds what they share.

Members of this host come by a socket without a name in any directory, and are handed two files in
memory: the board, for sums and their result, and the state, for newcomers. Members of other hosts
come by TCP, and read and write the same bytes through a second connection. Who cannot prove to know
the secret of the job is sent away. All messages are JSON, one object a line.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import selectors
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from unisono.launch.elastic.coordinator import LINE, Coordinator, mark_of
from unisono.launch.pool.payload import nameless_file

QUIET_S = 3
"""A host of which nothing comes for so many seconds, not even from its kernel, is gone."""
_HELLO_BYTES = 1 << 16
"""Who has not proved to know the secret may say no more than that."""
_CHUNK = 1 << 20
_MARKS_S, _NAP_S = 0.02, 3e-4
"""Longest time until a member of another host is told marks, and between two looks at them."""
BOARD, STATE = 0, 1
"""Numbers of the two files."""


def send_line(connection: socket.socket, message: Mapping[str, Any]) -> None:
    """Send one message."""
    connection.sendall(json.dumps(message).encode() + b"\n")


def notice_loss(connection: socket.socket) -> None:
    """Have the kernel end a connection to a host that does not answer any more."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 1),
        ("TCP_KEEPINTVL", 1),
        ("TCP_KEEPCNT", QUIET_S),
        ("TCP_USER_TIMEOUT", QUIET_S * 1000),
    ):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def read_mark(board: int, place: int) -> int:
    """Return the mark of the member at a place."""
    return int.from_bytes(os.pread(board, 8, place * LINE), sys.byteorder)


class Seat:
    """A connection, and who is at its other end."""

    def __init__(self, connection: socket.socket, *, is_near: bool) -> None:
        self.connection = connection
        self.is_near = is_near
        self.nonce = secrets.token_hex(16)
        self.number: int | None = None
        self.rank, self.pid, self.host = -1, 0, ""
        self.since = time.monotonic()
        self._rest = b""

    def read(self) -> list[dict[str, Any]] | None:
        """Return the messages that have come; None at the end, or if it is not one of ours."""
        try:
            size = _CHUNK
            if self.number is None:
                # No more than one line: what comes after it may be for the memory, see `_carry`.
                seen = self.connection.recv(_HELLO_BYTES, socket.MSG_PEEK)
                size = seen.find(b"\n") + 1 or len(seen)
            data = self.connection.recv(size)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if not data or (self.number is None and len(self._rest) > _HELLO_BYTES):
            return None
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            return None
        return messages if all(isinstance(message, dict) for message in messages) else None


class Hub:
    """Serves one training. Its descriptor tells when there is something to do; then `turn`.

    Args:
        coordinator: decides.
        secret: of the job.
        fence: ends the process of a rank for good, so that it can write no more; given rank and
            process of a member on this host.
        on_event: told `(what, rank)` of `joined`, `died` and `retired`.
        listen_at: address at which members of other hosts may come; None: only this host.
        adds_guests: whether members of other hosts come on top of those that the coordinator
            wants already.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        *,
        secret: bytes,
        fence: Callable[[int, int], None] = lambda _rank, _pid: None,
        on_event: Callable[[str, int], object] = lambda _what, _rank: None,
        listen_at: str | None = None,
        adds_guests: bool = True,
    ) -> None:
        self.coordinator = coordinator
        self._adds_guests = adds_guests
        self.seats: dict[int, Seat] = {}
        self.recovered_s: list[float] = []
        """From each death to the end of the step that it hit."""
        self.joined_s: list[float] = []
        """From each arrival to the first step as a member."""
        self._last_news = time.monotonic()
        self._latest_marks: dict[int, int] = {}
        self.leavers: set[int] = set()
        """Processes on this host whose loop has ended."""
        self._secret = secret
        self._fence = fence
        self._on_event = on_event
        self._files = nameless_file(), nameless_file()
        self._facts: dict[str, Any] | None = None
        self._bytes = 0
        self._count = 0
        self._died_at: list[float] = []
        self._seen_members: set[int] = set()
        self._carriers: dict[int, tuple[socket.socket, threading.Thread]] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._selector = selectors.DefaultSelector()
        near = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        if sys.platform == "linux":
            self.near = f"@unisono-{secrets.token_hex(12)}"
            near.bind("\0" + self.near[1:])
        else:
            self._folder = tempfile.TemporaryDirectory(prefix="unisono-")
            self.near = str(Path(self._folder.name, "hub"))
            near.bind(self.near)
        self._doors = [near]
        self.far: tuple[str, int] | None = None
        """Where members of other hosts find us."""
        if listen_at is not None:
            family = socket.AF_INET6 if ":" in listen_at else socket.AF_INET
            far = socket.socket(family, socket.SOCK_STREAM)
            far.bind((listen_at, 0))
            self.far = listen_at, far.getsockname()[1]
            self._doors.append(far)
        for door in self._doors:
            door.listen(256)
            door.setblocking(False)
            self._selector.register(door, selectors.EVENT_READ, None)

    @property
    def guests(self) -> int:
        """How many members of other hosts there are."""
        return sum(not seat.is_near for seat in self.seats.values())

    @property
    def step(self) -> int:
        """The step that the first of the members is at."""
        begun = mark_of(self.coordinator.epoch, 0)
        return max(
            [self.coordinator.step, *((mark - begun) // 2 for mark in self._marks().values())]
        )

    def late(self, limit_s: float) -> dict[int, float]:
        """Return those for whom others have waited longer than that, and for how long."""
        marks, now = self._marks(), time.monotonic()
        if marks != self._latest_marks:
            self._latest_marks, self._last_news = marks, now
        quiet_s = now - self._last_news
        return dict.fromkeys(self.coordinator.late(marks), quiet_s) if quiet_s > limit_s else {}

    def dismiss(self, number: int, *, is_late: bool = False) -> None:
        """Let go of a member of another host that is not wanted any more, or keeps others waiting.

        From then on it can write nothing.
        """
        if (seat := self.seats.get(number)) is not None and not seat.is_near:
            with suppress(OSError):
                if not is_late:
                    send_line(seat.connection, {"kind": "over", "step": 0})
            self._drop(seat)

    def fileno(self) -> int:
        """Return a descriptor that is readable when there is something to do."""
        return self._selector.fileno()

    def close(self) -> None:
        """Let go of everything."""
        for connection, thread in self._carriers.values():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            thread.join()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, Seat):
                key.data.connection.close()
        for door in self._doors:
            door.close()
        self._selector.close()
        for fd in self._files:
            os.close(fd)
        if self._folder is not None:
            self._folder.cleanup()

    def turn(self, timeout_s: float | None = 0.0) -> bool:
        """Take what has come, and send the orders that follow from it."""
        for key, _ in self._selector.select(timeout_s):
            if key.data is None:
                self._open_door(key.fileobj)
            else:
                self._listen(key.data)
        return True

    def lost(self, seat: Seat) -> None:
        """The process of a member has ended: hear its last words, and give its work away."""
        while messages := seat.read():
            for message in messages:
                self._take(seat, message)
        self._drop(seat)

    def deliver(self) -> None:
        """Send what the coordinator orders, and note what has come of it."""
        coordinator = self.coordinator
        lines: dict[int, bytes] = {}
        for number, order in coordinator.take_orders():
            lines[number] = lines.get(number, b"") + json.dumps(order).encode() + b"\n"
        for number, data in lines.items():
            if (seat := self.seats.get(number)) is not None:
                # A pipe that is full belongs to somebody who has stopped reading for good.
                with suppress(OSError):
                    seat.connection.sendall(data)
        for number in coordinator.members.keys() - self._seen_members:
            if (seat := self.seats.get(number)) is not None:
                self.joined_s.append(time.monotonic() - seat.since)
                self._seen_members.add(number)
                self._on_event("joined", seat.rank)

    def _open_door(self, door: Any) -> None:
        with suppress(OSError):
            connection, _ = door.accept()
            connection.setblocking(False)
            is_near = connection.family == socket.AF_UNIX
            if not is_near:
                notice_loss(connection)
            seat = Seat(connection, is_near=is_near)
            send_line(connection, {"nonce": seat.nonce})
            self._selector.register(connection, selectors.EVENT_READ, seat)

    def _listen(self, seat: Seat) -> None:
        messages = seat.read()
        for message in messages or ():
            self._take(seat, message)
        if messages is None:
            self._drop(seat)

    def _take(self, seat: Seat, message: dict[str, Any]) -> None:
        if seat.number is not None:
            self._last_news = now = time.monotonic()
            if message["kind"] == "left" and seat.is_near:
                self.leavers.add(seat.pid)
            elif message["kind"] == "going" and self._is_current(message["epoch"]):
                self.recovered_s += [now - at for at in self._died_at]
                self._died_at.clear()
            self.coordinator.told(seat.number, message)
            self.deliver()
        elif not self._is_proof(message.get("proof"), seat.nonce):
            self._drop(seat)
        elif message.get("kind") == "carry":
            self._carry(seat, int(message["number"]))
        else:
            self._seat(seat, message)

    def _is_current(self, epoch: int) -> bool:
        """Whether a message does not tell of the time before a death."""
        return epoch == self.coordinator.epoch and self.coordinator.phase == "running"

    def _is_proof(self, answer: object, nonce: str) -> bool:
        """Whether only somebody with the secret can have answered this, see `seal.prove`."""
        expected = hmac.new(self._secret, nonce.encode(), hashlib.sha256).hexdigest()
        return hmac.compare_digest(str(answer).encode(errors="replace"), expected.encode())

    def _seat(self, seat: Seat, message: dict[str, Any]) -> None:
        """Take a newcomer in, unless its results would have other bits."""
        facts: dict[str, Any] = message["facts"]
        if self._facts is None:
            self._facts, self._bytes = facts, int(message["bytes"])
            os.ftruncate(self._files[BOARD], self._bytes)
        there = self._facts
        if facts != there:
            unlike = sorted(name for name in facts if facts[name] != there.get(name))
            shown = [f"{name}: {facts[name]} here, {there.get(name)} there" for name in unlike]
            self._answer(seat, {"kind": "refused", "why": "\n".join(shown)})
            return
        seat.number, self._count = self._count, self._count + 1
        seat.rank, seat.pid, seat.host = message["rank"], message["pid"], message["host"]
        self.seats[seat.number] = seat
        self._answer(seat, {"kind": "welcome", "number": seat.number})
        if not seat.is_near:
            self.coordinator.target += self._adds_guests
        self.coordinator.reached = self.step
        self.coordinator.joined(
            seat.number, rank=seat.rank, shards=message["shards"], step=message["step"]
        )
        self.deliver()

    def _answer(self, seat: Seat, message: dict[str, Any]) -> None:
        """Answer a newcomer, with the files if it is of this host; it may have died meanwhile."""
        with suppress(OSError):  # whose end is read from its connection
            if seat.is_near and seat.number is not None:
                line = json.dumps(message).encode() + b"\n"
                socket.send_fds(seat.connection, [line], list(self._files))
            else:
                send_line(seat.connection, message)

    def _drop(self, seat: Seat) -> None:
        """Let go of a connection; what a member had to do goes to others."""
        with suppress(KeyError, ValueError):
            self._selector.unregister(seat.connection)
        seat.connection.close()
        if seat.number is None or self.seats.pop(seat.number, None) is None:
            return
        number = seat.number
        was_member = number in self.coordinator.members
        has_left = was_member and self.coordinator.members[number].has_left
        is_retired = number in self.coordinator.retired
        if number in self._carriers:
            connection, thread = self._carriers.pop(number)
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            thread.join()
        if seat.is_near and not has_left:
            self._fence(seat.rank, seat.pid)
        mark = self._marks().get(number, 0)  # the last: nothing writes any more
        if was_member and not has_left:
            self._died_at.append(time.monotonic())
        if not has_left and self.coordinator.phase != "over":
            self._on_event("retired" if is_retired else "died", seat.rank)
        if not seat.is_near and not has_left:
            self.coordinator.target -= self._adds_guests
        if not has_left:
            self.coordinator.died(number, mark)
            self.deliver()

    def _marks(self) -> dict[int, int]:
        members = self.coordinator.members.items()
        return {number: read_mark(self._files[BOARD], member.place) for number, member in members}

    # The memory, for members of other hosts.

    def _carry(self, seat: Seat, number: int) -> None:
        """Serve reads and writes of a member that does not share our memory."""
        self._selector.unregister(seat.connection)
        if number not in self.seats or number in self._carriers:
            seat.connection.close()
            return
        seat.connection.setblocking(True)
        work = (seat.connection, self._files)
        thread = threading.Thread(target=_serve_memory, args=work, name="unisono-hub", daemon=True)
        self._carriers[number] = seat.connection, thread
        thread.start()


def _serve_memory(connection: socket.socket, files: tuple[int, int]) -> None:
    """Read and write stretches of the two files until the connection ends."""
    stream = connection.makefile("rb")
    with connection, stream, suppress(OSError, ValueError):
        while line := stream.readline():
            order = json.loads(line)
            fd, begin, size = files[order["file"]], order.get("begin", 0), order.get("size", 0)
            if order["kind"] == "write":
                if order["file"] == STATE and begin == 0:
                    os.ftruncate(fd, order["end"])
                while size:
                    data = stream.read(min(size, _CHUNK))
                    if not data:
                        return
                    os.pwrite(fd, data, begin)
                    begin, size = begin + len(data), size - len(data)
                connection.sendall(b"\n")  # before this it must not say that it has written
            elif order["kind"] == "marks":
                end = time.monotonic() + _MARKS_S
                while True:
                    marks = [read_mark(fd, place) for place in range(order["count"])]
                    if min(marks) >= order["mark"] or time.monotonic() > end:
                        break
                    time.sleep(_NAP_S)
                connection.sendall(json.dumps(marks).encode() + b"\n")
            else:
                while size:
                    data = os.pread(fd, min(size, _CHUNK), begin)
                    connection.sendall(data)
                    begin, size = begin + len(data), size - len(data)
