"""Connections between members with memory of their own: what one leaves on its board travels.

Each member pushes to each other one, over one connection, what that one will read: a piece of its
sums, its piece of the result, notes and marks, in the order in which it wrote them. So a mark that
has arrived says that all before it has. A thread of the receiver writes to its board. Connections
live as long as an epoch, and a member closes its own before it says that it stands still: nothing
of an older epoch can arrive in a later one.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from unisono.launch.channel import ControlChannel, Listener, dial

Ranges = Callable[[int], Iterable[tuple[int, int]]]
"""Given the place of a member: the bytes of the board that it needs."""
Address = tuple[Sequence[str], int]
"""Names of a host, and a port."""

MEET_S = 5.0
"""Longest try to reach another member."""
_TRY_S = 1.0
_LOOK_S = 0.02
"""Seconds between two looks for orders while a connection is full."""
_HELLO = struct.Struct("<qqq")
_HEAD = struct.Struct("<QQ")
_MARK = struct.Struct("<qqq")
_MARK_SIZE = 1 << 63
"""Stands for a mark in the place of a size."""
_STATE = -1
"""Stands for a request of the state in the place of an epoch."""
_CHUNK = 1 << 20
_MORE: int = getattr(socket, "MSG_MORE", 0)
"""Tells the system that more follows at once, where it wants to know."""


class Unreachable(Exception):
    """A member cannot be reached, or has hung up."""


class Peers:
    """The connections of one member.

    Args:
        key: of the job; who does not know it is sent away.
        board: the memory of this member.
        put_mark: writes a mark and two words to the board, as `(place, mark, *words)`.
        state_fd: file with the state that this member has left for newcomers.

    Attributes:
        address: where others reach this member.
        is_broken: whether a connection of this epoch has ended.
    """

    def __init__(
        self,
        key: bytes,
        board: memoryview,
        put_mark: Callable[[int, int, int, int], None],
        state_fd: int,
    ) -> None:
        from unisono.launch.places.agents import ALL_INTERFACES
        from unisono.launch.places.rendezvous import candidates

        self._key, self._board = key, board
        self._put_mark, self._state_fd = put_mark, state_fd
        self._listener = Listener(key, ALL_INTERFACES)
        self.address: Address = candidates(), self._listener.port
        self.is_broken = False
        self._outgoing: list[tuple[socket.socket, int]] = []
        self._incoming: dict[socket.socket, threading.Thread] = {}
        self._changed = threading.Condition()
        self._place = -1
        self._open: int | None = None
        """The epoch whose connections are taken."""
        self._closed = 0
        """The last epoch whose connections are taken no more."""
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._serve, name="unisono-peers", daemon=True)
        self._thread.start()

    def meet(self, order: dict[str, Any], is_disturbed: Callable[[], bool]) -> None:
        """Connect to each other member; raises `Unreachable`."""
        self.part()
        place, epoch = order["place"], order["epoch"]
        self.is_broken = False
        with self._changed:
            self._open, self._place = epoch, place
            self._changed.notify_all()
        for target, address in enumerate(order["addresses"]):
            if target != place:
                connection = self._dial(address, is_disturbed)
                connection.sendall(_HELLO.pack(epoch, place, target))
                self._outgoing.append((connection, target))

    def push(self, ranges: Ranges, is_disturbed: Callable[[], bool]) -> None:
        """Send bytes of the board to each other member; raises `Unreachable`."""
        for connection, target in self._outgoing:
            for begin, end in ranges(target):
                if end > begin:
                    head = _HEAD.pack(begin, end - begin)
                    self._send(connection, head, is_disturbed, _MORE)
                    self._send(connection, self._board[begin:end], is_disturbed)

    def push_mark(self, line: Sequence[int], is_disturbed: Callable[[], bool]) -> None:
        """Send the mark of this member, and its words, to each other one."""
        data = _HEAD.pack(self._place, _MARK_SIZE) + _MARK.pack(*line)
        for connection, _ in self._outgoing:
            self._send(connection, data, is_disturbed)

    def part(self) -> None:
        """Close all connections; afterwards nothing is written to the board from here."""
        with self._changed:
            self._closed, self._open = max(self._closed, self._open or 0), None
            self._changed.notify_all()
            incoming = dict(self._incoming)
        for connection in (*incoming, *(connection for connection, _ in self._outgoing)):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in incoming.values():
            thread.join()
        for connection, _ in self._outgoing:
            connection.close()
        self._outgoing.clear()

    def fetch_state(self, address: Address, size: int) -> bytes:
        """Return the state that another member has left; raises `Unreachable`."""
        data = bytearray(size)
        with self._dial(address, lambda: False) as connection:
            try:
                connection.sendall(_HELLO.pack(_STATE, size, 0))
                _read(connection, memoryview(data))
            except (OSError, EOFError) as error:
                raise Unreachable(f"the state of a member was cut off: {error}") from None
        return bytes(data)

    def close(self) -> None:
        """Let everything go."""
        self.part()
        with self._changed:
            self._closed = 1 << 62
            self._changed.notify_all()
        os.write(self._wake_write, b".")
        self._thread.join()
        self._listener.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    # What goes out.

    def _dial(self, address: Address, is_disturbed: Callable[[], bool]) -> socket.socket:
        names, port = address
        end = time.monotonic() + MEET_S
        while True:
            try:
                connection = dial(ControlChannel(), self._key, names, port, _TRY_S).socket
            except OSError as error:
                if time.monotonic() > end or is_disturbed():
                    at = ", ".join(f"{name}:{port}" for name in names)
                    raise Unreachable(f"no member answers at {at}: {error}") from None
                time.sleep(_LOOK_S)
            else:
                connection.setblocking(True)
                return connection

    def _send(
        self,
        connection: socket.socket,
        data: bytes | memoryview,
        is_disturbed: Callable[[], bool],
        flags: int = 0,
    ) -> None:
        """Send all of it, unless an order comes that makes it vain."""
        view = memoryview(data)
        while view:
            try:
                view = view[connection.send(view, socket.MSG_DONTWAIT | flags) :]
            except BlockingIOError:
                poll = select.poll()
                poll.register(connection, select.POLLOUT)
                if not poll.poll(1000 * _LOOK_S) and (self.is_broken or is_disturbed()):
                    raise Unreachable("what was being sent is not needed any more") from None
            except OSError as error:
                raise Unreachable(f"a member has hung up: {error}") from None

    # What comes in.

    def _serve(self) -> None:
        """Welcome other members until this one leaves."""
        poll = select.poll()
        for fd in (self._listener.fileno(), self._wake_read):
            poll.register(fd, select.POLLIN)
        while True:
            left_s = self._listener.seconds_left()
            ready = poll.poll(None if left_s is None else 1000 * left_s + 1)
            if any(fd == self._wake_read for fd, _ in ready):
                return
            for channel, _ in self._listener.news():
                self._listener.forget(channel)
                connection = channel.release()
                take = threading.Thread(target=self._take, args=(connection,), daemon=True)
                take.start()

    def _take(self, connection: socket.socket) -> None:
        """Receive what one member sends, as long as the epoch lasts that it is for."""
        with connection, suppress(OSError, EOFError):
            connection.settimeout(MEET_S)
            hello = bytearray(_HELLO.size)
            _read(connection, memoryview(hello))
            connection.settimeout(None)
            epoch, source, target = _HELLO.unpack(hello)
            if epoch == _STATE:
                self._give_state(connection, source)
                return
            with self._changed:
                self._changed.wait_for(lambda: epoch <= self._closed or epoch == self._open)
                # Another host may have the same address inside its network.
                if epoch != self._open or target != self._place:
                    return
                self._incoming[connection] = threading.current_thread()
            try:
                self._fill(connection)
            finally:
                with self._changed:
                    del self._incoming[connection]
                    self.is_broken |= self._open == epoch

    def _fill(self, connection: socket.socket) -> None:
        head, line = bytearray(_HEAD.size), bytearray(_MARK.size)
        while True:
            _read(connection, memoryview(head))
            begin, size = _HEAD.unpack(head)
            if size == _MARK_SIZE:
                _read(connection, memoryview(line))
                self._put_mark(begin, *_MARK.unpack(line))
            elif begin + size <= len(self._board):
                _read(connection, self._board[begin : begin + size])
            else:
                raise EOFError("more than the board holds")

    def _give_state(self, connection: socket.socket, size: int) -> None:
        place = 0
        while place < size and (data := os.pread(self._state_fd, _CHUNK, place)):
            connection.sendall(data)
            place += len(data)


def _read(connection: socket.socket, data: memoryview) -> None:
    """Fill all of `data`."""
    while data:
        count = connection.recv_into(data)
        if not count:
            raise EOFError("the other side has hung up")
        data = data[count:]
