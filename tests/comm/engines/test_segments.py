"""Shared segments: where they are, who may open them, what they cost, what is left behind."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from unisono.comm import transports, world
from unisono.comm.engines.core import SegmentTicket, SharedSegment
from unisono.errors import UnisonoError
from unisono.processes import is_dead, process_start


def open_fds():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_segment_is_found_by_its_ticket_until_it_is_sealed():
    fds = open_fds()
    made = SharedSegment.create(8192)
    found = SharedSegment.open(SegmentTicket.parse(str(made.ticket)))
    memoryview(made.memory)[5000] = 77
    assert memoryview(found.memory)[5000] == 77
    made.seal()
    made.seal()
    with pytest.raises(OSError, match=r"."):
        SharedSegment.open(made.ticket)
    found.seal()
    assert memoryview(found.memory)[5000] == 77
    assert open_fds() == fds


def test_another_file_in_the_place_of_a_segment_is_refused():
    made = SharedSegment.create(4096)
    for wrong in (replace(made.ticket, nonce="00" * 16), replace(made.ticket, size=123)):
        with pytest.raises(OSError, match="another file"):
            SharedSegment.open(wrong)
    made.seal()


def test_a_full_memory_is_an_error_with_the_needed_size(monkeypatch):
    def full(fd, offset, length):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    fds = open_fds()
    made = SharedSegment.create(8 << 20)
    with pytest.raises(UnisonoError, match=r"8\.0 MB of shared memory") as caught:
        made.reserve(0, 8 << 20, "a group of 2 ranks")
    assert "HINT" in str(caught.value)
    made.seal()
    assert open_fds() == fds


def test_memory_is_mapped_as_long_as_somebody_looks_at_it():
    made = SharedSegment.create(1 << 20)
    made.seal()

    def mappings():
        return Path("/proc/self/maps").read_text().count("memfd:unisono")

    before = mappings()
    tensor = torch.frombuffer(made.memory, dtype=torch.float32, offset=64, count=100)
    del made
    assert mappings() == before
    tensor.fill_(3.0)
    del tensor
    assert mappings() == before - 1


def test_own_process_lives_and_an_ended_one_does_not():
    pid = os.getpid()
    started = process_start(pid)
    assert started
    assert not is_dead(pid, started)
    assert is_dead(pid, started - 1)  # the id of a process that ended long ago, used again
    child = subprocess.Popen(["sleep", "60"])
    child_started = process_start(child.pid)
    assert not is_dead(child.pid, child_started)
    child.kill()
    while Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        pass
    assert is_dead(child.pid, child_started)  # a zombie
    child.wait()
    assert is_dead(child.pid, child_started)


def test_registering_twice_changes_nothing():
    transports.register()
    before = dict(dist.Backend._plugins)
    transports.register()
    assert before == dist.Backend._plugins
    assert transports.available()["shm"] == "ok"


@pytest.mark.ranks(3, backend="shm")
def test_a_rank_that_cannot_map_the_segment_is_reached_over_the_network(monkeypatch):
    def forbidden(ticket):
        raise PermissionError(errno.EACCES, "no access to the other process")

    if dist.get_rank() == 1:
        monkeypatch.setattr(SharedSegment, "open", forbidden)
    group = dist.new_group(backend="shm")
    x = torch.ones(100_000)
    dist.all_reduce(x, group=group)
    assert x.unique().tolist() == [3.0]
    assert world().of(group).backend == "gloo"
    dist.destroy_process_group(group)


@pytest.mark.ranks(2, backend="shm")
def test_a_full_memory_is_refused_on_all_ranks_when_a_group_is_made(monkeypatch):
    def full(fd, offset, length):
        raise OSError(errno.ENOSPC, "No space left on device")

    if dist.get_rank() == 0:
        monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UnisonoError, match="a shm group of 2 ranks with slots of 1024 KB"):
        dist.new_group(backend="shm")


@pytest.mark.ranks(2, backend="shm", timeout=120)
def test_a_thousand_groups_made_and_destroyed_leave_nothing(monkeypatch):
    monkeypatch.setenv("UNISONO_SHM_SLOT_KB", "4")  # a third of the time; as many things to leave

    def holdings():
        maps = Path("/proc/self/maps").read_text().count("memfd:unisono")
        return open_fds(), threading.active_count(), maps

    before = None
    for number in range(1000):  # one thing left by one group of all is seen at the end
        group = dist.new_group(backend="shm")
        x = torch.ones(3)
        dist.all_reduce(x, group=group)
        dist.all_reduce(x, group=group, async_op=True).wait()
        if number % 10 == 0:
            dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, x, 1 - dist.get_rank(), group),
                    dist.P2POp(dist.irecv, torch.empty(3), 1 - dist.get_rank(), group),
                ]
            )[1].wait()
        dist.destroy_process_group(group)
        before = before or holdings()
    assert holdings() == before


@pytest.mark.ranks(2)
def test_a_world_destroyed_and_made_again_in_one_store():
    store = dist.PrefixStore("again", dist.distributed_c10d._get_default_store())
    rank = dist.get_rank()
    gloo = dist.group.WORLD
    dist.destroy_process_group()
    for number in range(3):
        dist.init_process_group("shm", store=store, rank=rank, world_size=2)
        x = torch.full((2,), float(number))
        dist.all_reduce(x)
        assert x.tolist() == [2.0 * number] * 2
        dist.destroy_process_group()
    del gloo
    dist.init_process_group("gloo", store=dist.PrefixStore("end", store), rank=rank, world_size=2)
