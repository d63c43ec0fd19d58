"""The control channel: messages between a supervisor and an agent, over connections that may break.

Both sides prove that they know the key of the run before either unpickles a byte:

    server   magic, nonce
    client   nonce, identity of the channel, frames received so far, proof
    server   frames received so far, proof

Then come frames: length, number, number of the last frame received, body, digest. The digest covers
a counter of the connection, so a frame that is changed, left out, cut off or sent again ends the
connection. Frames that the other side has not acknowledged are kept; after a break they are sent
again, so each message arrives once and in order. A sender may run ahead by `WINDOW_BYTES`, no more:
a reader that is slow slows the writer down.
"""

from __future__ import annotations

import hashlib
import hmac
import pickle
import secrets
import selectors
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

MAGIC = b"unisono\x01"
KEY_BYTES = 32
WINDOW_BYTES = 8 << 20
"""Most bytes that may be sent without an acknowledgement."""
GREETING_S = 10.0
"""Longest time a connection may take to prove that it knows the key."""
GUESTS = 128
"""Most connections without that proof; the oldest is dropped first."""
_LONGEST_BYTES = 1 << 28
"""Largest message."""
_READ_BYTES = 1 << 18
_NONCE_BYTES = 32
_IDENTITY_BYTES = 16
_PROOF_BYTES = 32
_DIGEST_BYTES = 16
_HEAD = struct.Struct("<IQQ")
_COUNT = struct.Struct("<Q")
_ANSWER_BYTES = _NONCE_BYTES + _IDENTITY_BYTES + _COUNT.size + _PROOF_BYTES
_SILENT_MS = 10_000
"""Without an acknowledgement of sent data for so long, the connection breaks."""


def new_key() -> bytes:
    """Return the key of a run."""
    return secrets.token_bytes(KEY_BYTES)


class Broken(Exception):
    """A connection has ended.

    Attributes:
        was_closed: whether the other host closed it, as it does for a process that has ended; else
            the network, or a frame that is not authentic, broke it.
    """

    def __init__(self, reason: str, *, was_closed: bool = False) -> None:
        super().__init__(reason)
        self.was_closed = was_closed


@dataclass(frozen=True)
class Connection:
    """A connection whose other end has proved that it knows the key."""

    socket: socket.socket
    send_key: bytes
    receive_key: bytes
    received: int
    """Number of frames that the other end has received, over all connections of the channel."""


def _proof(key: bytes, role: bytes, *parts: bytes) -> bytes:
    return hmac.new(key, role + b"".join(parts), hashlib.sha256).digest()


def _digest(key: bytes, counter: int, head: bytes, body: bytes) -> bytes:
    mac = hashlib.blake2b(_COUNT.pack(counter), key=key, digest_size=_DIGEST_BYTES)
    mac.update(head)
    mac.update(body)
    return mac.digest()


class ControlChannel:
    """Messages in both directions, in order and each once, over connections that may break.

    The socket does not block: `receive` reads what has arrived, `flush` sends what it takes.
    """

    def __init__(self) -> None:
        self.identity = secrets.token_bytes(_IDENTITY_BYTES)
        self.received = 0
        """Number of frames received."""
        self._connection: Connection | None = None
        self._sent = 0
        self._queue: deque[Iterator[Any]] = deque()
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._outgoing = bytearray()
        self._incoming = bytearray()
        self._count_in = self._count_out = 0
        self._owes_acknowledgement = False
        self._inbox: list[Any] = []
        self._end: Broken | None = None

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection now."""
        return self._connection is not None

    @property
    def has_room(self) -> bool:
        """Whether a message would be sent soon; else the other side is slow or disconnected."""
        return not self._queue and self._kept_bytes < WINDOW_BYTES

    @property
    def is_drained(self) -> bool:
        """Whether the other side has received every message."""
        return not self._queue and not self._kept

    @property
    def wants_write(self) -> bool:
        """Whether `flush` has data left to send."""
        return bool(self._outgoing)

    def fileno(self) -> int:
        """Return the descriptor of the connection."""
        return self._connected().socket.fileno()

    def _connected(self) -> Connection:
        if self._connection is None:
            raise Broken("there is no connection")
        return self._connection

    def attach(self, connection: Connection) -> None:
        """Continue over a new connection: send again what the other side has not received."""
        self.detach()
        self._connection, self._end = connection, None
        self._incoming.clear()
        self._outgoing.clear()
        self._count_in = self._count_out = 0
        self._acknowledge(connection.received)
        for number, body in self._kept:
            self._pack(number, body)
        self.flush()

    def detach(self) -> None:
        """Close the connection; frames without an acknowledgement wait for the next one."""
        if self._connection is not None:
            self._connection.socket.close()
            self._connection = None

    def release(self) -> socket.socket:
        """Return the socket of the connection, blocking, as the caller's from now on."""
        plain, self._connection = self._connected().socket, None
        plain.setblocking(True)
        return plain

    def send(self, message: Any) -> None:
        """Queue a message; it is sent as soon as there is room."""
        self._queue.append(iter((message,)))
        self.flush()

    def stream(self, messages: Iterable[Any]) -> None:
        """Queue messages that are made one by one, when there is room for each."""
        self._queue.append(iter(messages))
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes; `receive` notices a broken connection."""
        connection = self._connection
        if connection is None:
            return
        with suppress(OSError):
            while self._outgoing or self._fill():
                sent = connection.socket.send(self._outgoing)
                del self._outgoing[:sent]

    def receive(self) -> list[Any]:
        """Return new messages; raise `Broken` when the connection has ended.

        Messages from before the end are returned first.
        """
        connection = self._connected()
        if self._end is None:
            try:
                self._read(connection)
            except Broken as end:
                self._end = end
            self.flush()
        if self._end is not None and not self._inbox:
            raise self._end
        messages, self._inbox = self._inbox, []
        return messages

    def _read(self, connection: Connection) -> None:
        try:
            data = connection.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except ConnectionResetError as error:
            raise Broken(str(error.strerror), was_closed=True) from error
        except OSError as error:
            raise Broken(str(error.strerror)) from error
        if not data:
            raise Broken("it was closed", was_closed=True)
        self._incoming += data
        self._take(connection)

    def _fill(self) -> bool:
        """Pack the next frame, if there is one and room for it; return whether there is data."""
        body = self._next_body() if self._kept_bytes < WINDOW_BYTES else None
        if body is not None:
            self._sent += 1
            self._kept.append((self._sent, body))
            self._kept_bytes += len(body)
            self._pack(self._sent, body)
        elif self._owes_acknowledgement:
            self._pack(0, b"")
        return bool(self._outgoing)

    def _next_body(self) -> bytes | None:
        """Return the next message, or None without one."""
        while self._queue:
            for message in self._queue[0]:
                return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
            self._queue.popleft()
        return None

    def _pack(self, number: int, body: bytes) -> None:
        connection = self._connection
        if connection is None:
            return
        head = _HEAD.pack(len(body), number, self.received)
        digest = _digest(connection.send_key, self._count_out, head, body)
        self._count_out += 1
        self._owes_acknowledgement = False
        for part in (head, body, digest):
            self._outgoing += part

    def _take(self, connection: Connection) -> None:
        """Decode complete frames, and collect the messages that they complete."""
        incoming, place = self._incoming, 0
        while len(incoming) - place >= _HEAD.size:
            length, number, received = _HEAD.unpack_from(incoming, place)
            if length > _LONGEST_BYTES:
                raise Broken(f"a frame of {length} bytes; the most is {_LONGEST_BYTES}")
            begin = place + _HEAD.size
            end = begin + length + _DIGEST_BYTES
            if len(incoming) < end:
                break
            head, body = bytes(incoming[place:begin]), bytes(incoming[begin : begin + length])
            expected = _digest(connection.receive_key, self._count_in, head, body)
            if not hmac.compare_digest(expected, incoming[begin + length : end]):
                raise Broken("a frame with a wrong digest")
            self._count_in += 1
            place = end
            self._acknowledge(received)
            if number == 0:
                continue
            if number != self.received + 1:
                raise Broken(f"frame {number} after frame {self.received}")
            self.received = number
            self._owes_acknowledgement = True
            self._inbox.append(pickle.loads(body))
        del incoming[:place]

    def _acknowledge(self, received: int) -> None:
        """Forget frames that the other side has received."""
        while self._kept and self._kept[0][0] <= received:
            self._kept_bytes -= len(self._kept.popleft()[1])


# The side of the supervisor.


@dataclass(eq=False)
class _Guest:
    """A connection that has not yet proved that it knows the key."""

    socket: socket.socket
    name: str
    nonce: bytes
    until: float
    received: bytearray


class Listener:
    """The port of a supervisor, and the channels of those who have connected.

    Call `prepare` before each wait, and `news` when its descriptor is readable. A line is printed
    for each connection that is dropped.

    Args:
        key: of the run.
        address: where to listen.

    Attributes:
        port: where it listens.
    """

    def __init__(self, key: bytes, address: str = "127.0.0.1") -> None:
        self._key = key
        self.address = address
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._door = socket.create_server((address, 0), family=family, backlog=1024)
        self._door.setblocking(False)
        self.port: int = self._door.getsockname()[1]
        self._guests: deque[_Guest] = deque()
        self._channels: dict[bytes, ControlChannel] = {}
        self._fds: dict[ControlChannel, int] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._door, selectors.EVENT_READ, None)

    def fileno(self) -> int:
        """Return a descriptor that is readable when there is something to do."""
        return self._selector.fileno()

    def seconds_left(self) -> float | None:
        """Return the seconds until `news` must be called; None if only its descriptor tells."""
        return max(0.0, self._guests[0].until - time.monotonic()) if self._guests else None

    def prepare(self) -> None:
        """Watch all channels, also for room if they have something to send; before each wait."""
        for channel in self._channels.values():
            if not channel.is_connected:
                continue
            events = selectors.EVENT_READ | selectors.EVENT_WRITE * channel.wants_write
            fd = self._fds.get(channel)
            if fd is None:
                fd = self._fds[channel] = channel.fileno()
                self._selector.register(fd, events, channel)
            elif self._selector.get_key(fd).events != events:
                self._selector.modify(fd, events, channel)

    def news(self) -> list[tuple[ControlChannel, list[Any] | Broken | None]]:
        """Return the new messages of channels, `Broken` for an end, None for a new connection."""
        news: list[tuple[ControlChannel, list[Any] | Broken | None]] = []
        for key, _ in self._selector.select(0):
            source = key.data
            if source is None:
                self._accept()
            elif isinstance(source, _Guest):
                if source in self._guests and (channel := self._hear(source)) is not None:
                    news.append((channel, None))
            elif source in self._fds:  # else it was reconnected just now
                source.flush()
                try:
                    news.append((source, source.receive()))
                except Broken as end:
                    self._unwatch(source)
                    source.detach()
                    news.append((source, end))
        while self._guests and self._guests[0].until <= time.monotonic():
            self._drop(self._guests[0], f"said nothing for {GREETING_S:g} s")
        return news

    def forget(self, channel: ControlChannel) -> None:
        """Stop watching a channel, and accept no new connection of it."""
        self._channels.pop(channel.identity, None)
        self._unwatch(channel)

    def close(self) -> None:
        """Stop listening; channels stay open."""
        for guest in self._guests:
            guest.socket.close()
        self._door.close()
        self._selector.close()

    def _unwatch(self, channel: ControlChannel) -> None:
        if (fd := self._fds.pop(channel, None)) is not None:
            self._selector.unregister(fd)

    def _accept(self) -> None:
        while True:
            try:
                connection, address = self._door.accept()
            except OSError:  # no connection, or no descriptor for it: it stays in the queue
                return
            connection.setblocking(False)
            _watch_network(connection)
            nonce = secrets.token_bytes(_NONCE_BYTES)
            until = time.monotonic() + GREETING_S
            guest = _Guest(connection, str(address[0]), nonce, until, bytearray())
            self._guests.append(guest)
            self._selector.register(connection, selectors.EVENT_READ, guest)
            if len(self._guests) > GUESTS:
                self._drop(self._guests[0], "had to make room for others")
            with suppress(OSError):
                connection.send(MAGIC + nonce)

    def _hear(self, guest: _Guest) -> ControlChannel | None:
        """Read the answer of a guest; return its channel once it has proved itself."""
        try:
            data = guest.socket.recv(_ANSWER_BYTES - len(guest.received))
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        guest.received += data
        if not data:
            self._drop(guest, "hung up")
        if not data or len(guest.received) < _ANSWER_BYTES:
            return None
        answer = bytes(guest.received)
        state, proof = answer[:-_PROOF_BYTES], answer[-_PROOF_BYTES:]
        if not hmac.compare_digest(_proof(self._key, b"client", guest.nonce, state), proof):
            self._drop(guest, "does not know the key of this run")
            return None
        identity = state[_NONCE_BYTES : _NONCE_BYTES + _IDENTITY_BYTES]
        (received,) = _COUNT.unpack_from(state, _NONCE_BYTES + _IDENTITY_BYTES)
        if identity not in self._channels:
            if received:
                self._drop(guest, "goes on with a channel that is not of this run")
                return None
            self._channels[identity] = ControlChannel()
        channel = self._channels[identity]
        count = _COUNT.pack(channel.received)
        self._unwatch(channel)
        self._guests.remove(guest)
        self._selector.unregister(guest.socket)
        with suppress(OSError):  # then its first use says so
            guest.socket.send(count + _proof(self._key, b"server", guest.nonce, state, count))
        channel.attach(
            Connection(
                guest.socket,
                send_key=_proof(self._key, b"down", guest.nonce, state),
                receive_key=_proof(self._key, b"up", guest.nonce, state),
                received=received,
            )
        )
        return channel

    def _drop(self, guest: _Guest, why: str) -> None:
        line = f"unisono: a connection from {guest.name} was dropped: it {why}"
        print(line, file=sys.stderr, flush=True)
        self._guests.remove(guest)
        self._selector.unregister(guest.socket)
        guest.socket.close()


# The side of an agent.


def dial(
    channel: ControlChannel, key: bytes, addresses: Sequence[str], port: int, timeout_s: float
) -> Connection:
    """Connect a channel at the first address that answers; blocks.

    Raises:
        ConnectionRefusedError: at all addresses that answered, no process listens.
        OSError: none answered as a supervisor with this key does.
    """
    errors: list[OSError] = []
    for address in addresses:
        try:
            connection = socket.create_connection((address, port), timeout_s)
        except OSError as error:
            errors.append(error)
            continue
        try:
            return _greet(connection, channel, key)
        except (OSError, EOFError) as error:
            connection.close()
            errors.append(OSError(f"{address}:{port} does not speak as a supervisor: {error}"))
    refused = [error for error in errors if isinstance(error, ConnectionRefusedError)]
    raise refused[0] if len(refused) == len(errors) and refused else errors[-1]


def _greet(connection: socket.socket, channel: ControlChannel, key: bytes) -> Connection:
    greeting = _exactly(connection, len(MAGIC) + _NONCE_BYTES)
    if not greeting.startswith(MAGIC):
        raise OSError("another greeting")
    nonce = greeting[len(MAGIC) :]
    state = secrets.token_bytes(_NONCE_BYTES) + channel.identity + _COUNT.pack(channel.received)
    connection.sendall(state + _proof(key, b"client", nonce, state))
    answer = _exactly(connection, _COUNT.size + _PROOF_BYTES)
    count, proof = answer[: _COUNT.size], answer[_COUNT.size :]
    if not hmac.compare_digest(_proof(key, b"server", nonce, state, count), proof):
        raise OSError("another key")
    connection.setblocking(False)
    _watch_network(connection)
    return Connection(
        connection,
        send_key=_proof(key, b"up", nonce, state),
        receive_key=_proof(key, b"down", nonce, state),
        received=_COUNT.unpack(count)[0],
    )


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            raise EOFError("it hung up")
        data += piece
    return data


def _watch_network(connection: socket.socket) -> None:
    """Let the system detect that the other host is gone, at no cost while it answers."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 3),
        ("TCP_KEEPINTVL", 2),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", _SILENT_MS),
    ):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
