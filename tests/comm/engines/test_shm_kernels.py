"""Every kernel of the shm engine against plain arithmetic: dtypes, sizes around the slot, blocking
and not.
"""

from __future__ import annotations

import contextlib
import itertools
import os

import numpy as np
import pytest
import torch
import torch.distributed as dist

from unisono import torch_private as private
from unisono.comm import reductions
from unisono.comm.engines.signature import OPS
from unisono.comm.reductions import defined_ops
from unisono.errors import UnisonoError

DTYPES = [d for d in reductions.DTYPES if defined_ops(d) and d != torch.complex32]
SIZES = [0, 1, 7, 1000, 2048, 2049, 5000]
"""Elements; with slots of 4 KB these lie around one and two slots."""
WAYS = {
    "large_slots": {},
    "small_slots": {"UNISONO_SHM_SLOT_KB": "4"},
}
DEADLINE = {"async_op": False, "timeout_s": 20.0}

each_way = pytest.mark.parametrize("way", WAYS)
at_2_to_4 = pytest.mark.ranks([2, 3, 4], backend="shm", timeout=40)


@contextlib.contextmanager
def engine_made(way):
    """Yield the engine of a new group of all ranks, made with other settings."""
    before = {name: os.environ.get(name) for name in WAYS[way]}
    os.environ.update(WAYS[way])
    try:
        group = dist.new_group(backend="shm")
        yield group.unisono_engine
        dist.destroy_process_group(group)
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def block(rank, n, dtype):
    """What a rank brings: small whole numbers, exact in every dtype."""
    return ((torch.arange(n) * 7 + rank * 3) % 5).to(dtype)


def values(x):
    """As numpy can compute with it."""
    return (x.float() if x.dtype in (torch.bfloat16, torch.float16) else x).numpy()


def reduced(blocks, op):
    """The reduction of blocks by numpy."""
    stack = np.stack([values(b) for b in blocks])
    if blocks[0].dtype == torch.bool:
        op = {"sum": "or", "max": "or", "product": "and", "min": "and"}.get(op, op)
    if op == "mean":
        return stack.mean(0)
    with np.errstate(over="ignore"):
        fold = {
            "sum": np.add,
            "sum64": np.add,
            "product": np.multiply,
            "min": np.minimum,
            "max": np.maximum,
            "and": np.bitwise_and,
            "or": np.bitwise_or,
            "xor": np.bitwise_xor,
        }[op]
        result = stack[0]
        for row in stack[1:]:
            result = fold(result, row)
    return result


def assert_equal(found, expected):
    np.testing.assert_array_equal(values(found), expected.astype(values(found).dtype))


@at_2_to_4
@each_way
def test_all_reduce_of_every_dtype_and_size(way):
    with engine_made(way) as engine:
        for dtype in DTYPES:
            for n in SIZES:
                x = block(engine.rank, n, dtype)
                engine.all_reduce_(x, "sum", **DEADLINE)
                assert_equal(x, reduced([block(r, n, dtype) for r in range(engine.size)], "sum"))


@at_2_to_4
def test_all_reduce_and_reduce_with_every_operation():
    with engine_made("small_slots") as engine:
        me, last = engine.rank, engine.size - 1
        for op, dtype, n in itertools.product(OPS, DTYPES, (5, 3000)):
            if op not in defined_ops(dtype):
                continue
            expected = reduced([block(r, n, dtype) for r in range(engine.size)], op)
            x, y = block(me, n, dtype), block(me, n, dtype)
            engine.all_reduce_(x, op, **DEADLINE)
            if op == "mean":
                np.testing.assert_allclose(values(x), expected, rtol=4e-3)
            else:
                assert_equal(x, expected)
            engine.reduce_(y, last, op, **DEADLINE)  # the other ranks' tensors are theirs
            assert torch.equal(y, x if me == last else block(me, n, dtype))


@at_2_to_4
@each_way
def test_broadcast_from_each_rank(way):
    with engine_made(way) as engine:
        for dtype in (torch.float32, torch.bool, torch.float8_e4m3fn, torch.complex128):
            for n in SIZES:
                for src in range(engine.size):
                    x = block(engine.rank, n, torch.float32).to(dtype)
                    engine.broadcast_(x, src, **DEADLINE)
                    expected = block(src, n, torch.float32).to(dtype)
                    assert torch.equal(x.view(torch.uint8), expected.view(torch.uint8))


def uneven(engine, n):
    """Sizes of blocks, some of them empty."""
    return [n if r == 1 else (0 if r == 2 else n // 3 + r) for r in range(engine.size)]


@at_2_to_4
@each_way
def test_all_gather_and_gather_of_uneven_blocks(way):
    with engine_made(way) as engine:
        for dtype in (torch.float32, torch.int16, torch.bool):
            for n in SIZES:
                sizes = uneven(engine, n)
                x = block(engine.rank, sizes[engine.rank], dtype)
                outs = [torch.empty(size, dtype=dtype) for size in sizes]
                engine.all_gather(outs, x, **DEADLINE)
                expected = [block(r, size, dtype) for r, size in enumerate(sizes)]
                assert all(torch.equal(a, b) for a, b in zip(outs, expected, strict=True))
                for dst in range(engine.size):
                    outs = [torch.empty(size, dtype=dtype) for size in sizes]
                    mine = outs if dst == engine.rank else None
                    engine.gather(mine, x, dst, **DEADLINE)
                    if mine is not None:
                        assert all(torch.equal(a, b) for a, b in zip(mine, expected, strict=True))


@at_2_to_4
@each_way
def test_scatter_of_uneven_blocks_from_each_rank(way):
    with engine_made(way) as engine:
        for n in SIZES:
            sizes = uneven(engine, n)
            for src in range(engine.size):
                ins = [block(r + 10, size, torch.float64) for r, size in enumerate(sizes)]
                out = torch.empty(sizes[engine.rank], dtype=torch.float64)
                engine.scatter(out, ins if src == engine.rank else None, src, **DEADLINE)
                assert torch.equal(out, ins[engine.rank])


@at_2_to_4
@each_way
def test_reduce_scatter_of_uneven_blocks_also_in_place(way):
    with engine_made(way) as engine:
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            for n in SIZES:
                sizes = uneven(engine, n)
                ins = [block(engine.rank + 2 * q, size, dtype) for q, size in enumerate(sizes)]
                me = engine.rank
                expected = reduced(
                    [block(r + 2 * me, sizes[me], dtype) for r in range(engine.size)], "sum"
                )
                out = torch.empty(sizes[me], dtype=dtype)
                engine.reduce_scatter(out, ins, "sum", **DEADLINE)
                assert_equal(out, expected)
                engine.reduce_scatter(ins[me], ins, "sum", **DEADLINE)
                assert_equal(ins[me], expected)


@at_2_to_4
@each_way
def test_all_to_all_of_uneven_blocks(way):
    with engine_made(way) as engine:
        for n in SIZES:

            def size(src, dst, n=n):
                return 0 if (src + dst) % 3 == 2 else n // (1 + (src * 2 + dst) % 3)

            me = engine.rank
            ins = [block(me * 5 + q, size(me, q), torch.int32) for q in range(engine.size)]
            outs = [torch.empty(size(q, me), dtype=torch.int32) for q in range(engine.size)]
            engine.all_to_all(outs, ins, **DEADLINE)
            for q, out in enumerate(outs):
                assert torch.equal(out, block(q * 5 + me, size(q, me), torch.int32))


@at_2_to_4
@each_way
def test_ints_and_barrier(way):
    with engine_made(way) as engine:
        for _ in range(20):
            rows = engine.all_gather_ints([engine.rank, -7, 2**40], timeout_s=20)
            assert rows == [(r, -7, 2**40) for r in range(engine.size)]
            engine.barrier(**DEADLINE)


@at_2_to_4
def test_calls_without_waiting_end_in_the_order_in_which_they_were_issued():
    engine = dist.group.WORLD.unisono_engine
    xs = [torch.full((n,), 1.0) for n in (3, 300_000, 5, 0, 70_000)]
    tickets = [engine.all_reduce_(x, "sum", async_op=True, timeout_s=20) for x in xs]
    y = torch.full((4,), 2.0)
    engine.all_reduce_(y, "sum", **DEADLINE)  # queues behind them
    assert all(ticket.done() for ticket in tickets)
    for ticket in tickets:
        ticket.wait(20)
    for x in [*xs, y / 2]:
        assert torch.equal(x, torch.full_like(x, float(engine.size)))


@at_2_to_4
def test_all_ranks_get_the_same_bits_and_the_sum_in_rank_order():
    engine = dist.group.WORLD.unisono_engine
    for n in (100, 50_001):
        everybody = [
            torch.randn(n, generator=torch.Generator().manual_seed(r)) * 10.0**r
            for r in range(engine.size)
        ]
        expected = everybody[0].clone()
        for x in everybody[1:]:
            expected += x
        x = everybody[engine.rank].clone()
        engine.all_reduce_(x, "sum", **DEADLINE)
        assert torch.equal(x, expected)
        pieces = [p.clone() for p in everybody[engine.rank].tensor_split(engine.size)]
        out = torch.empty_like(pieces[engine.rank])
        engine.reduce_scatter(out, pieces, "sum", **DEADLINE)
        assert torch.equal(out, expected.tensor_split(engine.size)[engine.rank])


@pytest.mark.ranks(2, backend="shm")
def test_an_undefined_reduction_is_refused_and_leaves_the_group_intact():
    with pytest.raises(UnisonoError, match="can be moved but not added"):
        dist.all_reduce(torch.zeros(3, dtype=torch.float8_e5m2))
    with pytest.raises(UnisonoError, match="defined for float32"):
        dist.all_reduce(torch.zeros(3), dist.ReduceOp.BAND)
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x.tolist() == [2.0] * 3


@pytest.mark.ranks(1, backend="shm")
def test_a_group_of_one_rank_needs_no_shared_memory():
    engine = dist.group.WORLD.unisono_engine
    x, out = torch.arange(3.0), torch.empty(3)
    engine.all_reduce_(x, "sum", **DEADLINE)
    engine.all_gather([out], x, **DEADLINE)
    assert out.tolist() == [0.0, 1.0, 2.0]
    dist.all_reduce(x)
    assert dist.all_reduce(x, async_op=True).wait()
    assert x.tolist() == [0.0, 1.0, 2.0]
    y, whole, part = torch.arange(6.0).view(2, 3), torch.empty(2, 3), torch.empty(2, 3)
    private.all_gather_single(whole, y)
    private.reduce_scatter_single(part, y)
    assert torch.equal(whole, y)
    assert torch.equal(part, y)
    assert dist.get_backend() == "shm"
