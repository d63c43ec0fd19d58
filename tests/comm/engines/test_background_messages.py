"""Messages that nobody waits for move on in the background."""

from __future__ import annotations

import time

import pytest
import torch

from unisono.comm import world
from unisono.comm.health.watchdog import default_store


@pytest.mark.ranks(2, backend=["gloo", "shm"])
def test_a_long_message_goes_on_after_its_sender_waited_for_another():
    comm, store = world(), default_store()
    long, short = torch.ones(3_000_000), torch.zeros(1)
    if comm.rank == 0:
        sent = comm.start.send(long, 1, tag=1)
        comm.recv_(short, 1, tag=2)  # long enough for the background to fall asleep
        give_up = time.monotonic() + 12
        while not store.check(["arrived"]):
            assert time.monotonic() < give_up, "nobody moves the message on"
            time.sleep(0.01)
        sent.wait()
    else:
        time.sleep(0.3)
        comm.send(short, 0, tag=2)
        comm.recv_(long.zero_(), 0, tag=1)
        store.set("arrived", "")
        assert long.sum() == len(long)


@pytest.mark.ranks(2, backend=["gloo", "shm"])
def test_messages_can_be_asked_for_and_arrive_when_their_handle_is_let_go():
    comm = world()
    peer = 1 - comm.rank
    for length in (3, 1_000_000):
        comm.start.send(torch.full((length,), 1.0 + comm.rank), peer, tag=1)
        arriving = comm.start.recv(torch.empty(length), peer, tag=1)
        give_up = time.monotonic() + 12
        while not arriving.done():
            assert time.monotonic() < give_up, "done() never says so"
            time.sleep(0.005)
        assert torch.equal(arriving.wait(), torch.full((length,), 1.0 + peer))
