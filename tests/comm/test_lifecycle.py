"""Stores and the start of a world, as far as one process can show it; ranks: tests/launch."""

from __future__ import annotations

import ctypes
import os
import platform
import socket
from pathlib import Path

import pytest
import torch.distributed as dist

from unisono.comm import machine
from unisono.comm.lifecycle import open_store, start_world, stop_world
from unisono.environment import Environment
from unisono.errors import PlatformError

pytestmark = pytest.mark.usefixtures("hygiene")


@pytest.fixture(scope="module", autouse=True)
def first_store_of_the_process() -> None:
    """The first store opens a pipe that torch's event loop keeps for the life of the process."""
    open_store(rank_of_two(0), timeout_s=5)


def rank_of_two(rank: int, master: tuple[str, int] | None = None) -> Environment:
    return Environment(
        kind="unisono", rank=rank, size=2, local_rank=rank, local_size=2, master=master
    )


def test_rank_0_gets_a_port_and_listens_on_loopback_only():
    store = open_store(rank_of_two(0), timeout_s=5)
    port = store.port
    joined = open_store(rank_of_two(1, ("127.0.0.1", port)), timeout_s=5)
    store.set("word", "heard")
    assert joined.get("word") == b"heard"
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    with socket.socket() as other:
        other.bind(("127.0.0.2", port))  # would be taken, had the store asked for all addresses


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the resolver of glibc")
def test_ranks_join_their_store_without_a_question_to_a_name_server(monkeypatch):
    unnamed = ("192.0.2.1", 80)  # kept for documentation: nobody has a name for it

    def connected(*args, **kwargs):
        with pytest.raises(socket.gaierror) as refused:
            socket.getnameinfo(unnamed, socket.NI_NAMEREQD)
        answers.append(refused.value.errno)
        return store(*args, **kwargs)

    answers, store = [], dist.TCPStore
    monkeypatch.setattr(dist, "TCPStore", connected)
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")  # as in all ranks of ours
    kept = open_store(rank_of_two(0), timeout_s=5)
    open_store(rank_of_two(1, ("127.0.0.1", kept.port)), timeout_s=5)
    assert answers == [socket.EAI_AGAIN] * 2  # nobody was there to ask
    state = ctypes.CDLL(None).__res_state
    state.restype = ctypes.POINTER(ctypes.c_int * 2)
    assert state().contents[1] > 0  # lookups of the user's are tried as before


def test_two_worlds_never_get_the_same_port():
    stores = [open_store(rank_of_two(0), timeout_s=5) for _ in range(5)]
    assert len({store.port for store in stores}) == 5


def test_a_given_port_is_bound_exactly_or_refused():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PlatformError, match=f"127.0.0.1:{port}") as caught:
            open_store(rank_of_two(0), addr="127.0.0.1", port=port, timeout_s=5)
    assert "in use" in str(caught.value)
    assert open_store(rank_of_two(0), addr="127.0.0.1", port=port, timeout_s=5).port == port


def test_the_store_of_another_run_is_refused():
    store = open_store(rank_of_two(0), timeout_s=5, nonce="run-a")
    with pytest.raises(PlatformError, match="run-a instead of run-b"):
        open_store(rank_of_two(1, ("127.0.0.1", store.port)), timeout_s=5, nonce="run-b")


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_that_nobody_tells_an_address_says_what_to_set(rank):
    environment = Environment(kind="mpich", rank=rank, size=2)
    with pytest.raises(PlatformError, match="MASTER_ADDR and MASTER_PORT"):
        open_store(environment, timeout_s=5)


def test_a_bare_process_is_a_world_of_one_and_nothing_is_started():
    comm = start_world(Environment(kind="bare"))
    assert (comm.rank, comm.size, comm.group) == (0, 1, None)
    assert not dist.is_initialized()
    stop_world()


def test_a_started_world_puts_the_environment_back(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    comm = start_world(Environment(kind="unisono", rank=0, size=1), timeout_s=10)
    try:
        assert dist.is_initialized()
        assert comm.size == 1
        assert os.environ["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")
    finally:
        stop_world()
    assert not dist.is_initialized()
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    stop_world()


def test_an_interface_the_user_chose_stays(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    start_world(Environment(kind="unisono", rank=0, size=1), timeout_s=10)
    stop_world()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"


def _listens_at(port):
    """Return the numeric IPv4 addresses at which this host listens with that port."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    places = [row[1].split(":") for row in rows if row[3] == "0A"]
    found = [bytes.fromhex(addr)[::-1] for addr, number in places if int(number, 16) == port]
    return [".".join(map(str, addr)) for addr in found]


def test_the_store_of_several_hosts_listens_at_the_address_of_the_job_alone(monkeypatch):
    monkeypatch.setattr(machine, "is_loopback", lambda address: address == "127.0.0.1")
    monkeypatch.setattr(machine, "own_addresses", lambda: ["192.0.2.1", "127.0.0.2"])
    world = Environment(kind="unisono", rank=0, size=2, nodes=2, local_size=1)
    store = open_store(world, timeout_s=5)
    assert _listens_at(store.port) == ["127.0.0.2"]  # nobody here has the other one
    assert machine.of_job(["127.0.0.3"]) == "127.0.0.3"
    monkeypatch.setattr(machine, "interfaces", lambda: {"ib0": "127.0.0.4"})
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0,ib0")
    assert machine.of_job(["127.0.0.3"]) == "127.0.0.4"
    monkeypatch.setattr(machine, "own_addresses", list)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert machine.of_job(["127.0.0.1"]) == ""
