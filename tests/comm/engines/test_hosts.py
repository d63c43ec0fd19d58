"""Groups that span several hosts, rehearsed on one: shared memory inside, gloo between."""

from __future__ import annotations

import contextlib
import inspect
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.comm.engines import test_shm_kernels as kernels

import unisono
from unisono.comm import Communicator, world
from unisono.comm.engines.hosts import HostsEngine

DEADLINE = {"async_op": False, "timeout_s": 20.0}
LAYOUTS = {
    "2+2": ("a", "a", "b", "b"),
    "3+1": ("a", "a", "a", "b"),
    "2+2 mixed": ("a", "b", "b", "a"),
    "1+1+1+1": ("a", "b", "c", "d"),
}
KERNELS = [
    "test_all_reduce_of_every_dtype_and_size",
    "test_all_reduce_and_reduce_with_every_operation",
    "test_broadcast_from_each_rank",
    "test_all_gather_and_gather_of_uneven_blocks",
    "test_scatter_of_uneven_blocks_from_each_rank",
    "test_reduce_scatter_of_uneven_blocks_also_in_place",
    "test_all_to_all_of_uneven_blocks",
    "test_ints_and_barrier",
]

on_hosts = pytest.mark.parametrize("layout", LAYOUTS)
at_4 = pytest.mark.ranks(4, backend="shm", timeout=60)


@contextlib.contextmanager
def group_over(layout):
    """Yield a group whose ranks believe to be on the hosts of the layout."""
    os.environ["UNISONO_HOST_ID"] = LAYOUTS[layout][dist.get_rank()]
    try:
        group = dist.new_group(backend="shm")
        assert isinstance(group.unisono_engine, HostsEngine)
        yield group
        dist.destroy_process_group(group)
    finally:
        os.environ.pop("UNISONO_HOST_ID", None)


@at_4
@on_hosts
@pytest.mark.parametrize("name", KERNELS)
def test_kernels(layout, name, monkeypatch):
    with group_over(layout) as group:
        test, made = getattr(kernels, name), contextlib.nullcontext(group.unisono_engine)
        monkeypatch.setitem(test.__globals__, "engine_made", lambda way: made)
        test(**dict.fromkeys(inspect.signature(test).parameters, "over hosts"))


@at_4
@on_hosts
def test_messages(layout):
    with group_over(layout) as group:
        me, received = dist.get_rank(), torch.empty(1000)
        sends, recvs = [((me + 1) % 4, torch.full((1000,), 1.0 * me))], [((me - 1) % 4, received)]
        group.unisono_engine.exchange(sends, recvs, 3, **DEADLINE)
        assert received.unique().tolist() == [(me - 1) % 4]


@at_4
def test_torch_and_verbs_over_hosts():
    with group_over("3+1") as group:
        x = torch.full((3, 2), float(dist.get_rank()))
        dist.all_reduce(x.t(), group=group)
        assert x.unique().tolist() == [6.0]
        work = dist.all_reduce(x, group=group, async_op=True)
        work.wait()
        assert x.unique().tolist() == [24.0]
        everybody = [None] * 4
        dist.all_gather_object(everybody, dist.get_rank(), group=group)
        assert everybody == [0, 1, 2, 3]
        if dist.get_rank() == 3:
            dist.send(torch.ones(3), 0, group=group)
        elif dist.get_rank() == 0:
            y = torch.empty(3)
            assert dist.recv(y, group=group) == 3
            assert y.tolist() == [1.0] * 3
        comm = world().of(group)
        assert comm.all_reduce(torch.ones(2)).tolist() == [4.0, 4.0]
        buffer = comm.shared_buffer((5000,), torch.float32).fill_(1.0)
        comm.all_reduce_(buffer)
        assert buffer.unique().tolist() == [4.0]
        model = torch.nn.parallel.DistributedDataParallel(
            torch.nn.Linear(50, 50), process_group=group
        )
        model(torch.full((2, 50), float(dist.get_rank()))).sum().backward()
        assert model.module.weight.grad.unique().tolist() == [3.0]


@at_4
def test_a_shared_buffer_waits_for_calls_that_were_started_before_it():
    with group_over("2+2") as group:
        comm = world().of(group)
        pending = [comm.start.all_reduce(torch.ones(50_000)) for _ in range(3 * comm.rank)]
        while len(pending) < 9:
            pending.append(comm.start.all_reduce(torch.ones(50_000)))
        buffer = comm.shared_buffer((100,)).fill_(1.0)
        assert comm.all_reduce_(buffer).unique().tolist() == [4.0]
        assert all(p.wait().unique().tolist() == [4.0] for p in pending)


def connect_two_groups():
    with group_over("2+2") as one, group_over("2+2") as two:
        pending = []
        for group in (one, two) if dist.get_rank() < 2 else (two, one):
            pending.append(Communicator.of(group, timeout_s=10).start.all_reduce(torch.ones(2)))
            time.sleep(0.3)
        return [p.wait().tolist() for p in pending]


def test_two_groups_may_be_connected_in_any_order(monkeypatch):
    """A rank that waits for another in one thread must not keep its store from the others."""
    monkeypatch.setenv("UNISONO_BACKEND", "shm")
    for found in unisono.run(connect_two_groups, ranks=4, timeout_s=60):
        assert found == [[4.0] * 2] * 2


@at_4
def test_calls_started_in_inference_mode():
    with group_over("1+1+1+1") as group, torch.inference_mode():
        x, y = torch.ones(3), torch.ones(3, dtype=torch.bfloat16)
        world().of(group).start.all_reduce_(x).wait()
        dist.all_reduce(y, group=group, async_op=True).wait()
        assert x.tolist() == y.tolist() == [4.0] * 3


@at_4
@pytest.mark.parametrize("layout", ["1+1+1+1", "3+1"])
def test_calls_of_torch_on_tensors_of_several_dims_where_a_host_has_one_rank(layout):
    """Inputs keep their shape, outputs are cut flat: a copy by shape raised in a host of one."""
    with group_over(layout) as group:
        rank, x = dist.get_rank(), torch.full((2, 3), 1.0 + dist.get_rank())
        whole, part = torch.empty(8, 3), torch.empty(2, 3)
        dist.all_gather_single(whole, x, group=group)
        assert torch.equal(whole, torch.cat([torch.full((2, 3), 1.0 + r) for r in range(4)]))
        dist.reduce_scatter_single(part, whole, group=group)
        assert torch.equal(part, 4.0 * x)
        swapped = torch.empty(4, 6)
        dist.all_to_all_single(swapped, whole, group=group)
        assert torch.equal(swapped, torch.full((4, 6), 1.0 + rank))


@at_4
def test_all_ranks_get_the_same_bits():
    with group_over("2+2 mixed") as group:
        for n in (100, 50_000):
            seed = torch.Generator().manual_seed(dist.get_rank())
            x = torch.randn(n, generator=seed) * 10.0 ** dist.get_rank()
            group.unisono_engine.all_reduce_(x, "sum", **DEADLINE)
            everybody = [torch.empty(n) for _ in range(4)]
            dist.all_gather(everybody, x)
            assert all(torch.equal(x, y) for y in everybody)


def sockets():
    count = 0
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            count += str(fd.readlink()).startswith("socket:")
    return count


@at_4
def test_hosts_are_connected_when_they_first_talk_and_a_message_needs_no_other_rank():
    dist.barrier()
    before = sockets()
    with group_over("1+1+1+1") as group:
        made = sockets()
        assert made < before + 3  # it listens, but has no connection to each of the three others
        if dist.get_rank() == 1:
            dist.isend(torch.ones(3), 0, group=group).wait()
        elif dist.get_rank() == 0:
            y = torch.empty(3)
            dist.recv(y, 1, group=group)
            assert y.tolist() == [1.0] * 3
        dist.barrier()
        outs = [torch.empty(1) for _ in range(4)]
        group.unisono_engine.all_to_all(outs, [torch.ones(1)] * 4, **DEADLINE)
        assert sockets() >= made + 2
