"""The control channel: who may speak, what arrives, and what happens when connections break."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time

import pytest
from tests.waiting import wait_until

from unisono.launch import channel as channels
from unisono.launch.channel import (
    GREETING_S,
    MAGIC,
    WINDOW_BYTES,
    Broken,
    ControlChannel,
    Listener,
    dial,
    new_key,
)

KEY = bytes(range(32))


class Pair:
    """A listener with one channel, and its other end; relays bytes where a test asks for it."""

    def __init__(self):
        self.listener = Listener(KEY)
        self.client = ControlChannel()
        self.server = ControlChannel()
        self.connect()

    def connect(self, port=None):
        found = []
        at = port or self.listener.port
        thread = threading.Thread(
            target=lambda: found.append(dial(self.client, KEY, ["127.0.0.1"], at, 5.0))
        )
        thread.start()
        wait_until(lambda: self._arrived() or not thread.is_alive())
        thread.join()
        self.client.attach(found[0])

    def _arrived(self):
        arrived = [channel for channel, _ in self.listener.news()]
        self.server = arrived[0] if arrived else self.server
        return bool(arrived)

    def pump(self, until):
        """Carry messages both ways until a condition holds; return what each side has received."""
        heard = [], []
        deadline = time.monotonic() + 60
        while not until(*heard):
            assert time.monotonic() < deadline
            for end, messages in zip((self.client, self.server), heard, strict=True):
                if end.is_connected:
                    end.flush()
                    messages += end.receive()
        return heard

    def unplug(self):
        self.client.detach()
        self.server.detach()

    def close(self):
        self.unplug()
        self.listener.close()


@pytest.fixture
def pair():
    with contextlib.closing(Pair()) as pair:
        yield pair


def test_messages_arrive_whole_once_and_in_order_both_ways(pair):
    large = os.urandom(3 * WINDOW_BYTES + 17)
    up = [{"n": n} for n in range(100)] + [large, None, "last"]
    for message in up:
        pair.client.send(message)
    pair.server.stream({"chunk": n} for n in range(50))
    client, server = pair.pump(lambda down, ups: len(down) == 50 and len(ups) == len(up))
    assert server == up
    assert client == [{"chunk": n} for n in range(50)]
    pair.pump(lambda *_: pair.client.is_drained and pair.server.is_drained)


def test_a_stream_is_made_as_fast_as_the_other_side_reads(pair):
    made = []

    def endless():
        while True:
            made.append(1)
            yield b"x" * (1 << 20)

    pair.client.stream(endless())
    assert not pair.client.has_room
    for _ in range(100):
        pair.client.flush()  # nobody reads
    assert len(made) << 20 <= WINDOW_BYTES + (2 << 20)


def test_what_was_said_during_a_break_leaves_with_the_next_connection(pair):
    pair.unplug()
    pair.client.send("from the agent")
    pair.server.send("an order")
    pair.connect()
    for channel, message in ((pair.server, "from the agent"), (pair.client, "an order")):
        with selectors.DefaultSelector() as selector:  # no more than this is looked at in a wait
            selector.register(channel, selectors.EVENT_READ)
            assert selector.select(5.0)
        assert channel.receive() == [message]


def test_after_a_break_all_goes_on_where_it_was(pair):
    for n in range(500):
        pair.client.send((n, b"." * 5000))
    pair.server.send("down")
    heard = pair.pump(lambda down, ups: len(ups) > 100)[1]
    pair.client.detach()
    with contextlib.suppress(Broken):
        while True:
            heard += pair.server.receive()
    pair.server.detach()
    pair.client.send((500, b""))  # while there is no connection
    pair.connect()
    client, more = pair.pump(lambda down, ups: len(heard) + len(ups) == 501)
    assert [n for n, _ in [*heard, *more]] == list(range(501))
    assert client in ([], ["down"])


class Meddler:
    """Stands between both ends and changes what passes."""

    def __init__(self, pair, change):
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port = self._door.getsockname()[1]
        self._ends = []
        self._change = change
        self._target = pair.listener.port
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        near, _ = self._door.accept()
        far = socket.create_connection(("127.0.0.1", self._target))
        self._ends = [near, far]
        threading.Thread(target=self._carry, args=(far, near, bytes), daemon=True).start()
        self._carry(near, far, self._change)

    def _carry(self, source, target, change):
        try:
            while data := source.recv(1 << 16):
                target.sendall(change(data))
        except OSError:
            pass

    def close(self):
        for end in (*self._ends, self._door):
            end.close()


class Once:
    """Changes the data after the greeting, once."""

    def __init__(self, how):
        self.how = how
        self.seen = 0

    def __call__(self, data):
        self.seen += 1
        if self.seen == 1:  # the proof
            return data
        if self.how == "replayed":
            return data + data
        if self.how == "cut off":
            return data[:-1] + (b"" if self.seen > 2 else b"?")
        return bytes([data[0] ^ (self.how == "length"), *data[1:-1], data[-1] ^ 1])


@pytest.mark.parametrize("how", ["changed", "length", "replayed", "cut off"])
def test_what_was_meddled_with_ends_the_connection_and_is_never_unpickled(how, pair, monkeypatch):
    pair.unplug()
    meddler = Meddler(pair, Once(how))
    pair.connect(meddler.port)
    loaded = []
    monkeypatch.setattr(channels.pickle, "loads", lambda data: loaded.append(bytes(data)))
    pair.client.send("four")
    try:
        with pytest.raises(Broken) as caught:
            wait_until(lambda: pair.server.receive() and False)
        assert not caught.value.was_closed
        assert len(loaded) <= (how == "replayed")
    finally:
        meddler.close()


def speak(port, words):
    connection = socket.create_connection(("127.0.0.1", port), 5.0)
    connection.sendall(words)
    return connection


def test_strangers_are_dropped_with_one_line_each_and_others_come_in(pair, monkeypatch, capfd):
    monkeypatch.setattr(channels, "GREETING_S", 0.2)
    listener = pair.listener
    port = listener.port
    strangers = [
        speak(port, os.urandom(88)),  # garbage, as long as an answer
        speak(port, b"GET / HTTP/1.1\r\n\r\n"),  # too short: silence follows
        speak(port, b""),
    ]
    outcome = []

    def with_another_key():
        try:
            dial(ControlChannel(), new_key(), ["127.0.0.1"], port, 5.0)
        except OSError as error:
            outcome.append(str(error))

    threading.Thread(target=with_another_key).start()
    pair.client.send("still here")

    shown = []

    def served():
        assert listener.news() == []
        shown.extend(capfd.readouterr().err.splitlines())
        return len(shown) == 4 and outcome

    wait_until(served)
    assert sum("does not know the key" in line for line in shown) == 2
    assert sum("said nothing" in line for line in shown) == 2
    assert pair.pump(lambda down, ups: ups)[1] == ["still here"]
    for connection in strangers:
        with connection:
            assert connection.recv(64).startswith(MAGIC)
            assert connection.recv(64) == b""
    assert GREETING_S > 1


def test_only_so_many_strangers_wait_at_once_and_the_oldest_leaves(pair, monkeypatch, capfd):
    monkeypatch.setattr(channels, "GUESTS", 3)
    strangers = [speak(pair.listener.port, b"") for _ in range(5)]
    shown = []

    def served():
        pair.listener.news()
        shown.extend(capfd.readouterr().err.splitlines())
        return len(shown) == 2

    wait_until(served)
    for connection in strangers:
        connection.close()


def test_a_server_without_the_key_gets_nothing(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as door:
        heard = []

        def pretend():
            connection, _ = door.accept()
            with connection:
                connection.sendall(MAGIC + bytes(32))
                heard.append(connection.recv(1 << 16))
                connection.sendall(bytes(40))
                heard.append(connection.recv(1 << 16))

        thread = threading.Thread(target=pretend)
        thread.start()
        channel = ControlChannel()
        channel.send("secret")
        with pytest.raises(OSError, match="another key"):
            dial(channel, KEY, ["127.0.0.1"], door.getsockname()[1], 5.0)
        thread.join()
    assert len(heard[0]) == 88
    assert heard[1] == b""
    assert KEY not in heard[0]


def test_a_port_where_no_process_listens_is_told_from_one_that_does_not_answer():
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        dial(ControlChannel(), KEY, ["127.0.0.1"], port, 1.0)
