"""The hub of an elastic job: strangers who connect to it do no harm."""

from __future__ import annotations

import hashlib
import hmac
import json
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


def join(hub, member, **other):
    """Say what a member says first; the answer has not come yet."""
    hub.turn(5.0)
    nonce = json.loads(member.recv(4096))["nonce"]
    card = {"kind": "join", "facts": {}, "bytes": 1, "rank": 0, "pid": 0, "host": "h"}
    proof = hmac.new(SECRET, nonce.encode(), hashlib.sha256).hexdigest()
    card |= {"shards": 1, "step": 0, "proof": proof, **other}
    member.sendall(json.dumps(card).encode() + b"\n")


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
