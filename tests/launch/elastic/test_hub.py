"""The hub of an elastic job: strangers who connect to it do no harm."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
import time

import pytest

from unisono.launch.elastic.coordinator import Coordinator
from unisono.launch.elastic.hub import Hub

SECRET = b"of the job"


@pytest.fixture
def hub():
    made = Hub(Coordinator(1), secret=SECRET, listen_at="127.0.0.1")
    yield made
    made.close()


def turned(hub, condition):
    """Let the hub work until `condition()` holds."""
    end = time.monotonic() + 5.0
    while not condition():
        assert time.monotonic() < end
        hub.turn(0.05)


def is_sent_away(stranger):
    try:
        while stranger.recv(4096, socket.MSG_DONTWAIT):
            pass
    except BlockingIOError:
        return False
    except ConnectionResetError:
        pass
    return True


def say(connection, more=b"", **message):
    """Say the first word, with the proof, and perhaps more at once."""
    nonce = json.loads(connection.recv(4096))["nonce"]
    proof = hmac.new(SECRET, nonce.encode(), hashlib.sha256).hexdigest()
    connection.sendall(json.dumps({**message, "proof": proof}).encode() + b"\n" + more)


def join(hub, member, **other):
    """Say what a member says first; the answer has not come yet."""
    hub.turn(0.5)
    card = {"kind": "join", "facts": {}, "bytes": 1, "rank": 0, "pid": 0, "host": "h"}
    say(member, **{**card, "shards": 1, "step": 0, **other})


def test_who_does_not_know_the_secret_is_sent_away_and_members_are_served(hub):
    strangers = [
        b"1\n",
        b"[]\n",
        b"not JSON\n",
        b"[" * 60_000 + b"\n",
        b'{"kind": "join"}\n',
        b'{"proof": "caf\xc3\xa9"}\n',
        b'{"proof": "\\ud800"}\n',
        b"x" * 100_000,  # and no end of it
    ]
    for words in strangers:
        with socket.create_connection(hub.far) as stranger:
            stranger.sendall(words)
            turned(hub, lambda stranger=stranger: is_sent_away(stranger))
    assert not hub.seats
    with socket.create_connection(hub.far) as member, member.makefile("rb") as stream:
        join(hub, member)
        turned(hub, lambda: hub.seats)
        assert json.loads(stream.readline())["kind"] == "welcome"


@pytest.mark.parametrize("facts", [{}, {"torch": "another"}])
def test_a_member_that_dies_before_it_is_welcomed_does_no_harm(hub, facts):
    for threads in ({}, facts):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as member:
            member.connect("\0" + hub.near[1:])
            join(hub, member, facts=threads)
        turned(hub, lambda: len(hub._selector.get_map()) == 2)  # the two doors
    assert not hub.seats


def test_what_comes_with_the_first_word_of_a_carrier_is_written_to_the_memory(hub):
    with (
        socket.create_connection(hub.far) as member,
        socket.create_connection(hub.far) as carrier,
    ):
        turned(hub, lambda: len(hub._selector.get_map()) == 4)
        join(hub, member, bytes=4096)
        turned(hub, lambda: hub.seats)
        data = bytes(range(256)) * 16
        order = {"kind": "write", "file": 0, "begin": 0, "size": len(data), "end": len(data)}
        (number,) = hub.seats
        more = json.dumps(order).encode() + b"\n" + data
        say(carrier, more, kind="carry", number=number)
        turned(hub, lambda: number in hub._carriers)
        carrier.settimeout(5.0)
        assert carrier.recv(1) == b"\n"
        assert os.pread(hub._files[0], 4096, 0) == data
