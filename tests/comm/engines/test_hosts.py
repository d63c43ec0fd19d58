"""Groups that span several hosts, rehearsed on one: shared memory inside, gloo between."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from unisono.comm import world
from unisono.comm.engines.hosts import HostsEngine

DEADLINE = {"async_op": False, "timeout_s": 20.0}
LAYOUTS = {
    "2+2": ("a", "a", "b", "b"),
    "3+1": ("a", "a", "a", "b"),
    "2+2 mixed": ("a", "b", "b", "a"),
    "1+1+1+1": ("a", "b", "c", "d"),
}
SIZES = [0, 1, 7, 40_000]
DTYPES = [torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.complex64]

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
        del os.environ["UNISONO_HOST_ID"]


def block(rank, n, dtype=torch.float32):
    return ((torch.arange(n) * 7 + rank * 3) % 5).to(dtype)


def total(n, dtype, ranks=range(4)):
    blocks = torch.stack([block(r, n, dtype) for r in ranks])
    return blocks.any(0) if dtype == torch.bool else blocks.sum(0).to(dtype)


@at_4
@on_hosts
def test_reductions(layout):
    with group_over(layout) as group:
        engine = group.unisono_engine
        for dtype in DTYPES:
            for n in SIZES:
                x = block(engine.rank, n, dtype)
                engine.all_reduce_(x, "sum", **DEADLINE)
                assert torch.equal(x, total(n, dtype))
                y = block(engine.rank, n, dtype)
                engine.reduce_(y, 3, "sum", **DEADLINE)
                assert torch.equal(y, x if engine.rank == 3 else block(engine.rank, n, dtype))
                sizes = [n, n // 2, 0, n + 1]
                ins = [block(engine.rank, size, dtype) for size in sizes]
                out = torch.empty(sizes[engine.rank], dtype=dtype)
                engine.reduce_scatter(out, ins, "sum", **DEADLINE)
                assert torch.equal(out, total(sizes[engine.rank], dtype))
        z = torch.full((5,), 1.0 + engine.rank)
        engine.all_reduce_(z, "mean", **DEADLINE)
        assert z.tolist() == [2.5] * 5
        engine.all_reduce_(z, "product", **DEADLINE)
        assert z.tolist() == [2.5**4] * 5


@at_4
@on_hosts
def test_moves_and_messages(layout):
    with group_over(layout) as group:
        engine = group.unisono_engine
        me = engine.rank
        for n in SIZES:
            for root in range(4):
                x = block(me, n)
                engine.broadcast_(x, root, **DEADLINE)
                assert torch.equal(x, block(root, n))
            sizes = [n, n + 3, 0, n // 2]
            outs = [torch.empty(size) for size in sizes]
            engine.all_gather(outs, block(me, sizes[me]), **DEADLINE)
            assert all(torch.equal(o, block(q, sizes[q])) for q, o in enumerate(outs))
            outs = [torch.empty(n + q) for q in range(4)]
            engine.all_to_all(outs, [block(me * 4 + q, n + me) for q in range(4)], **DEADLINE)
            assert all(torch.equal(o, block(q * 4 + me, n + q)) for q, o in enumerate(outs))
            outs = [torch.empty(size) for size in sizes] if me == 2 else None
            engine.gather(outs, block(me, sizes[me]), 2, **DEADLINE)
            for q, out in enumerate(outs or []):
                assert torch.equal(out, block(q, sizes[q]))
            ins = [block(q, sizes[q]) for q in range(4)] if me == 1 else None
            out = torch.empty(sizes[me])
            engine.scatter(out, ins, 1, **DEADLINE)
            assert torch.equal(out, block(me, sizes[me]))
        right, left = (me + 1) % 4, (me - 1) % 4
        received = torch.empty(1000)
        engine.exchange([(right, block(me, 1000))], [(left, received)], 3, **DEADLINE)
        assert torch.equal(received, block(left, 1000))
        assert engine.all_gather_ints([me, 5], timeout_s=20) == [(r, 5) for r in range(4)]
        engine.barrier(**DEADLINE)


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
