"""Every verb against plain arithmetic, at 1 to 4 ranks, over dtypes and awkward sizes."""

from __future__ import annotations

import functools
import itertools
import operator
import threading
import time
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist

from unisono.comm import (
    Communicator,
    Pending,
    check,
    groups,
    perform,
    reductions,
    trace,
    world,
)
from unisono.comm.collectives import all_reduce_together
from unisono.comm.health.deadlock import announce_return
from unisono.comm.reductions import defined_ops
from unisono.errors import CollectiveMismatch, MeshError, PartitionError, UnisonoError

RANKS = [1, 2, 3, 4]
BACKENDS = ["gloo", "shm"]
DTYPES = [d for d in reductions.DTYPES if defined_ops(d) and d != torch.complex32]


def block(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What a rank brings: small whole numbers, exact in every dtype."""
    n = int(torch.Size(shape).numel())
    values = (torch.arange(n) * 7 + rank * 3) % 5
    return values.reshape(shape).to(dtype)


@pytest.mark.ranks(RANKS, backend=BACKENDS)
def test_all_reduce_sums_every_dtype_and_size():
    comm = world()
    for dtype, shape in itertools.product(DTYPES, [(0,), (1,), (7, 3), (), (40_000,)]):
        mine = block(comm.rank, shape, dtype)
        before = mine.clone()
        total = comm.all_reduce(mine)
        wide = torch.bool if dtype == torch.bool else torch.complex128
        blocks = [block(r, shape, dtype).to(wide) for r in range(comm.size)]
        expected = torch.stack(blocks).any(0) if dtype == torch.bool else sum(blocks)
        assert torch.equal(
            total, expected.to(dtype) if dtype.is_complex else expected.real.to(dtype)
        ), (dtype, shape)
        assert torch.equal(mine, before)
        assert total.shape == mine.shape
        assert total.dtype == dtype


@pytest.mark.ranks(RANKS, backend=BACKENDS)
def test_all_reduce_with_other_ops():
    comm = world()
    for dtype in (torch.float32, torch.float16, torch.int16, torch.uint64, torch.bool):
        blocks = [block(r, (5,), dtype).to(torch.float64) for r in range(comm.size)]
        stacked = torch.stack(blocks) + (dtype != torch.bool)
        mine = stacked[comm.rank].to(dtype)
        expected = {"min": stacked.amin(0), "max": stacked.amax(0), "product": stacked.prod(0)}
        for op, values in expected.items():
            assert torch.equal(comm.all_reduce(mine, op), values.to(dtype)), (dtype, op)
    masks = [torch.tensor([0b1100 >> r, 5]) for r in range(comm.size)]
    for op, apply in {"and": operator.and_, "or": operator.or_, "xor": operator.xor}.items():
        expected = functools.reduce(apply, masks)
        assert torch.equal(comm.all_reduce(masks[comm.rank], op), expected), op
    number = torch.tensor([2**63 + 5 if comm.rank == 0 else 7], dtype=torch.uint64)  # no sign
    assert comm.all_reduce(number, "max").tolist() == [2**63 + 5]
    assert comm.all_reduce(number, "min").tolist() == [7 if comm.size > 1 else 2**63 + 5]
    mean = comm.all_reduce(torch.full((2, 2), float(comm.rank), dtype=torch.float64), "mean")
    assert torch.equal(mean, torch.full_like(mean, (comm.size - 1) / 2))
    wide = comm.all_reduce(torch.tensor([1e8 if comm.rank == 0 else 1.0]), "sum64")
    assert torch.equal(wide, torch.tensor([1e8 + comm.size - 1]))


@pytest.mark.ranks([2, 4], backend=BACKENDS)
@pytest.mark.parametrize("n", [3, 100_000])
def test_sixteen_bit_sums_are_rounded_once(n):
    """Rounding after each addition would lose the small terms."""
    comm = world()
    mine = torch.full((n,), 256.0 if comm.rank == 0 else 0.75, dtype=torch.bfloat16)
    exact = torch.tensor(256.0 + 0.75 * (comm.size - 1)).to(torch.bfloat16)
    assert torch.equal(comm.all_reduce(mine), torch.full((n,), exact.item(), dtype=torch.bfloat16))
    later = comm.start.all_reduce(mine)
    assert torch.equal(later.wait(), torch.full((n,), exact.item(), dtype=torch.bfloat16))
    part = comm.reduce_scatter(mine)
    assert torch.equal(part, torch.full_like(part, exact.item()))


@pytest.mark.ranks([2, 3], backend=BACKENDS)
@pytest.mark.parametrize("n", [3, 100_000])
def test_sixteen_bit_means_are_divided_before_they_are_rounded(n):
    """The sum of numbers whose mean fits may fit no more."""
    comm = world()
    big = torch.full((n,), 40_000.0, dtype=torch.float16)
    means = [comm.all_reduce(big, "mean"), comm.start.all_reduce(big, "mean").wait()]
    means += [comm.reduce_scatter(big, op="mean"), comm.all_reduce_(big.clone(), "mean")]
    if (at_root := comm.reduce(big, 0, "mean")) is not None:
        means.append(at_root)
    assert all(torch.equal(mean, torch.full_like(mean, 40_000.0)) for mean in means)


@pytest.mark.ranks([1, 2], backend=BACKENDS)
def test_all_reduce_in_place_keeps_layout_and_leaf():
    comm = world()
    base = torch.arange(12.0).view(3, 4)
    view = base.t()[1:3]
    result = comm.all_reduce_(view)
    assert result is view
    assert torch.equal(base[:, 1:3], torch.arange(12.0).view(3, 4)[:, 1:3] * comm.size)
    leaf = torch.ones(3, requires_grad=True)
    comm.all_reduce_(leaf)
    assert leaf.tolist() == [float(comm.size)] * 3


@pytest.mark.ranks([2, 3], backend=BACKENDS)
def test_a_reduction_in_place_of_a_lazily_negated_element():
    """Of one element such a view counts as contiguous, but its memory holds the other sign."""
    ways = [lambda x: world().all_reduce_(x, "max")]
    if world().backend != "gloo":  # which takes the memory as it is
        ways.append(lambda x: dist.all_reduce(x, dist.ReduceOp.MAX))
    for reduce_ in ways:
        x = torch.complex(torch.zeros(1), torch.ones(1) + dist.get_rank())
        lazy = x.conj().imag  # -1 on rank 0, the largest
        assert lazy.is_neg()
        reduce_(lazy)
        assert lazy.item() == -1.0


@pytest.mark.ranks(RANKS, backend=BACKENDS)
def test_reduce_gives_the_result_to_one_rank_only():
    comm = world()
    dst = comm.size - 1
    mine = block(comm.rank, (3,), torch.float64)
    total = comm.reduce(mine, dst)
    if comm.rank == dst:
        assert torch.equal(total, sum(block(r, (3,), torch.float64) for r in range(comm.size)))
    else:
        assert total is None
    assert torch.equal(mine, block(comm.rank, (3,), torch.float64))


@pytest.mark.ranks(RANKS, backend=BACKENDS)
def test_all_gather_joins_uneven_blocks():
    comm = world()
    dtypes = (torch.float32, torch.bool, torch.int16, torch.float8_e5m2, torch.complex64)
    for dtype, rows in itertools.product(dtypes, (3, 30_000)):
        sizes = [(rows + r) if r != 1 else 0 for r in range(comm.size)]
        mine = block(comm.rank, (sizes[comm.rank], 2), dtype)
        expected = torch.cat([block(r, (sizes[r], 2), dtype) for r in range(comm.size)])
        for given in (None, sizes):
            joined = comm.all_gather(mine, sizes=given)
            assert torch.equal(joined.view(torch.uint8), expected.view(torch.uint8)), (dtype, rows)


@pytest.mark.ranks(RANKS, backend=BACKENDS)
def test_all_gather_along_any_dim_of_a_strided_tensor():
    comm = world()
    whole = torch.arange(2 * 3 * 12.0).view(2, 3, 12)
    mine = whole.tensor_split(comm.size, dim=2)[comm.rank].transpose(0, 1)
    assert torch.equal(comm.all_gather(mine, dim=-1), whole.transpose(0, 1))
    assert comm.all_gather(mine, dim=2).is_contiguous()
    assert comm.all_gather(torch.tensor(comm.rank)).tolist() == list(range(comm.size))


@pytest.mark.ranks([2, 3], backend=BACKENDS)
def test_blocks_without_rows_of_strided_tensors_travel():
    """They count as contiguous with any strides, and only the rank that had one raised."""
    comm = world()
    wide = torch.arange(8.0)[::2][: comm.rank]
    expected = torch.cat([torch.arange(8.0)[::2][:r] for r in range(comm.size)])
    assert torch.equal(comm.all_gather(wide), expected)
    joined = comm.gather(wide, comm.size - 1)
    assert joined is None or torch.equal(joined, expected)


@pytest.mark.ranks(RANKS, backend=BACKENDS)
def test_gather_and_scatter_are_inverse():
    comm = world()
    whole = torch.arange(14.0).view(2, 7)
    sizes = [7 - 2 * (comm.size - 1)] + [2] * (comm.size - 1) if comm.size < 4 else [0, 4, 1, 2]
    for given in (None, sizes):
        mine = comm.scatter(whole if comm.rank == 0 else None, 0, dim=1, sizes=given)
        back = comm.gather(mine, comm.size - 1, dim=1)
        if comm.rank == comm.size - 1:
            assert torch.equal(back, whole)
        else:
            assert back is None


@pytest.mark.ranks([1, 3], backend=BACKENDS)
def test_a_scatter_of_known_blocks_counts_dims_from_the_end_alike_on_all_ranks():
    """Only the source counted them from the front, which check mode took for different calls."""
    comm, whole = world(), torch.arange(6.0 * 4).view(4, 6)
    sizes = [6 // comm.size] * comm.size
    like = ((4, sizes[0]), torch.float32)
    with check():
        part = comm.scatter(whole if comm.rank == 0 else None, 0, -1, sizes, like=like)
    assert torch.equal(part, whole.split(sizes, 1)[comm.rank])


@pytest.mark.ranks(RANKS, backend=BACKENDS)
def test_reduce_scatter_gives_each_rank_its_block():
    comm = world()
    for rows in (2, 5, 50_000):
        mine = block(comm.rank, (3, rows), torch.float64)
        total = sum(block(r, (3, rows), torch.float64) for r in range(comm.size))
        part = comm.reduce_scatter(mine, dim=1)
        assert torch.equal(part, total.tensor_split(comm.size, dim=1)[comm.rank]), rows
        sizes = [0] * comm.size
        sizes[-1] = rows
        part = comm.reduce_scatter(mine, dim=1, sizes=sizes, op="max")
        assert part.shape == (3, sizes[comm.rank])


@pytest.mark.ranks(RANKS, backend=BACKENDS)
def test_all_to_all_delivers_rows_in_rank_order():
    comm = world()
    sizes = [[(r + q) % 3 for q in range(comm.size)] for r in range(comm.size)]
    mine = torch.cat(
        [torch.full((n, 2), 10.0 * comm.rank + q) for q, n in enumerate(sizes[comm.rank])]
    )
    expected = torch.cat(
        [torch.full((sizes[r][comm.rank], 2), 10.0 * r + comm.rank) for r in range(comm.size)]
    )
    assert torch.equal(comm.all_to_all(mine, sizes[comm.rank]), expected)
    recv = [sizes[r][comm.rank] for r in range(comm.size)]
    assert torch.equal(comm.all_to_all(mine, sizes[comm.rank], recv), expected)


@pytest.mark.ranks([2, 3], backend=BACKENDS)
def test_broadcast_reaches_ranks_that_bring_nothing():
    comm = world()
    data = torch.arange(6.0).view(2, 3).t()
    root = comm.size - 1
    got = comm.broadcast(data if comm.rank == root else None, root, like=((3, 2), torch.float32))
    assert torch.equal(got, data)
    mine = torch.zeros(2, 3).t()
    comm.broadcast_(mine.copy_(data) if comm.rank == root else mine, root)
    assert torch.equal(mine, data)


def float_or_int(comm, n=6):
    """Equally many bytes on all ranks, and another dtype on the last."""
    is_odd = comm.rank == comm.size - 1
    return torch.ones(n, dtype=torch.int32 if is_odd else torch.float32)


def short_or_long(comm, n=6):
    """One dtype on all ranks, and more rows on the last."""
    return torch.ones(n + comm.size * (comm.rank == comm.size - 1))


UNLIKE = {
    "all_reduce": lambda c, x: c.all_reduce(x),
    "all_reduce of halves": lambda c, x: c.all_reduce(x.half() if x.is_floating_point() else x),
    "reduce": lambda c, x: c.reduce(x, c.size - 1),
    "reduce_scatter": lambda c, x: c.reduce_scatter(x),
    "broadcast": lambda c, x: c.broadcast(x),
    "all_gather": lambda c, x: c.all_gather(x, 0, [len(x)] * c.size),
    "gather": lambda c, x: c.gather(x, 0, 0, [len(x)] * c.size),
    "scatter": lambda c, x: c.scatter(
        x, sizes=[len(x) // c.size] * c.size, like=((len(x) // c.size,), x.dtype)
    ),
    "all_to_all": lambda c, x: c.all_to_all(x, recv_sizes=[len(x) // c.size] * c.size),
    "started": lambda c, x: c.start.all_reduce(x).wait(),
}


@pytest.mark.ranks([2, 3], backend=BACKENDS, timeout=60)
@pytest.mark.parametrize("n", [6, 60_000])
@pytest.mark.parametrize("brought", [float_or_int, short_or_long])
def test_unlike_sizes_and_dtypes_are_refused_by_every_verb_on_all_ranks(brought, n):
    """gloo and MPI themselves compare nothing: the result would be garbage."""
    for verb, call in UNLIKE.items():
        comm = Communicator.of(dist.new_group())
        assert comm.all_reduce(torch.ones(n)).sum() == n * comm.size
        call(comm, torch.ones(n))
        with pytest.raises(CollectiveMismatch, match=r"ranks? .*bytes") as caught:
            call(comm, brought(comm, n))
        assert set(caught.value.calls) == set(range(comm.size)), verb
        with pytest.raises(UnisonoError, match=r"no longer usable|cannot be used"):
            comm.barrier()


@pytest.mark.ranks(2, backend=BACKENDS)
def test_roots_and_reductions_that_differ_are_refused():
    for call in (
        lambda c: c.broadcast(torch.ones(3), c.rank),
        lambda c: c.reduce(torch.ones(3), c.rank),
        lambda c: c.all_reduce(torch.ones(3), ["sum", "max"][c.rank]),
        lambda c: [c.all_reduce, c.reduce_scatter][c.rank](torch.ones(4)),
    ):
        with pytest.raises(CollectiveMismatch, match="different calls"):
            call(Communicator.of(dist.new_group()))


@pytest.mark.ranks(2, backend=BACKENDS)
@pytest.mark.parametrize("n", [6, 100_000])
def test_messages_of_another_size_or_dtype_are_refused(n):
    x = torch.arange(float(n))
    for like, told in (
        (((n,), torch.int32), "elements of float32"),
        (((n + 2,), torch.float32), f"{n * 4}"),
        (((n // 2,), torch.float64), "elements of float32"),
        (((100_006 - n,), torch.float32), f"{n * 4}|longer"),
    ):
        comm = Communicator.of(dist.new_group())
        if comm.rank == 0:
            comm.start.send(x, 1)
        else:
            with pytest.raises(CollectiveMismatch, match=told):
                comm.recv(like, 0)


@pytest.mark.ranks([1, 2], backend=BACKENDS)
def test_zeros_without_memory_and_lazy_conjugates_travel_by_every_verb():
    """torch makes such tensors: the gradient of `sgn`, the imaginary part of a conjugate."""
    comm = world()
    last, peer, half = comm.size - 1, (comm.rank + 1) % comm.size, 4 // comm.size
    source = (comm.rank - 1) % comm.size

    verbs = [
        lambda y: comm.all_reduce(y),
        lambda y: comm.reduce(y, last),
        lambda y: comm.reduce_scatter(y),
        lambda y: comm.broadcast(y, last),
        lambda y: comm.all_gather(y),
        lambda y: comm.all_gather(y, 0, [4] * comm.size),
        lambda y: comm.start.all_gather(y).wait(),
        lambda y: comm.gather(y, last),
        lambda y: comm.scatter(y if comm.rank == last else None, last),
        lambda y: comm.scatter(y, last, sizes=[half] * comm.size, like=((half,), y.dtype)),
        lambda y: comm.all_to_all(y),
        lambda y: comm.exchange({peer: y}, {source: ((4,), y.dtype)})[source],
    ]
    if comm.size > 1:
        verbs += [
            lambda y: comm._post({peer: y}, {source: y.clone()}).wait()[source],
            lambda y: [comm.start.send(y, peer), comm.recv(((4,), y.dtype), source)][1],
        ]
    real = (torch.arange(4.0) + comm.rank).to(torch.complex64)
    tensors = [
        torch._efficientzerotensor((4,)),
        torch._efficientzerotensor((4,), dtype=torch.complex64).conj(),
        torch._efficientzerotensor((2, 4))[1],
        (real * (1 + 2j)).conj(),
        (real * 1j).conj().imag,
    ]
    for x, verb in itertools.product(tensors, verbs):
        got, expected = verb(x), verb(x.clone())
        assert (got is None) == (expected is None)
        assert got is None or torch.equal(got, expected)
    for in_place in (comm.all_reduce_, comm.broadcast_):
        with pytest.raises(UnisonoError, match="no memory"):
            in_place(tensors[0])


@pytest.mark.ranks([2, 4], backend=BACKENDS)
def test_messages_arrive_in_order_and_by_tag():
    comm = world()
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    first = comm.start.send(torch.tensor([1.0, comm.rank]), right)
    second = comm.start.send(torch.tensor([2.0, comm.rank]), right, tag=5)
    assert comm.recv(((2,), torch.float32), left, tag=5).tolist() == [2.0, left]
    assert comm.recv(torch.empty(2), left).tolist() == [1.0, left]
    first.wait()
    second.wait()


@pytest.mark.ranks(RANKS, backend=BACKENDS)
def test_exchange_needs_no_order():
    comm = world()
    sends = {q: torch.full((q + 1, comm.rank), float(comm.rank)) for q in range(comm.size)}
    likes = {q: ((comm.rank + 1, q), torch.float32) for q in reversed(range(comm.size))}
    got = comm.exchange(sends, likes)
    for q, x in got.items():
        assert torch.equal(x, torch.full((comm.rank + 1, q), float(q)))


@pytest.mark.ranks(RANKS, backend=BACKENDS)
def test_every_verb_also_runs_async():
    comm = world()
    x = torch.arange(8.0) + comm.rank
    pending = [
        comm.start.all_reduce(x),
        comm.start.all_gather(x),
        comm.start.reduce_scatter(x),
        comm.start.broadcast(x),
        comm.start.all_to_all(torch.arange(float(comm.size))),
        comm.start.barrier(),
        comm.start.reduce(x),
        comm.start.gather(x),
        comm.start.scatter(x),
        comm.start.all_gather_object(comm.rank),
        comm.start.gather_object(comm.rank),
        comm.start.broadcast_object([comm.rank]),
        comm.start.all_equal({1}),
        comm.start.all_equal(comm.rank),
    ]
    assert all(isinstance(p, Pending) for p in pending)
    results = [p.wait() for p in reversed(pending)][::-1]
    assert all(p.done() for p in pending)
    assert torch.equal(results[0], comm.all_reduce(x))
    assert torch.equal(results[1], comm.all_gather(x))
    assert torch.equal(results[2], comm.reduce_scatter(x))
    assert results[9] == list(range(comm.size))
    assert results[10] == (results[9] if comm.rank == 0 else None)
    assert results[11:] == [[0], True, comm.size == 1]
    assert pending[0].wait() is results[0]


@pytest.mark.ranks(RANKS, backend=BACKENDS)
def test_objects_travel():
    comm = world()
    assert comm.all_gather_object({"rank": comm.rank}) == [{"rank": r} for r in range(comm.size)]
    assert comm.broadcast_object("x" * (comm.rank + 1), comm.size - 1) == "x" * comm.size
    gathered = comm.gather_object(lambda: comm.rank, 0)
    assert (gathered is None) == (comm.rank != 0)


@pytest.mark.ranks([1, 3], backend=BACKENDS)
def test_all_equal_compares_values_and_types():
    comm = world()
    assert comm.all_equal({"lr": 0.1, "layers": [1, 2]})
    assert comm.all_equal(torch.arange(1000.0))
    lazy = torch.tensor([1 + 2j, 3 - 1j]).conj()
    assert comm.all_equal(lazy)
    assert comm.all_equal(lazy.imag if comm.rank else torch.tensor([-2.0, 1.0]))
    assert comm.all_equal({"a": 1, "b": 2} if comm.rank else {"b": 2, "a": 1})
    assert comm.all_equal({0, 8} if comm.rank else {8, 0})  # iterated in different orders
    if comm.size > 1:
        assert not comm.all_equal(comm.rank)
        assert not comm.all_equal(1 if comm.rank else 1.0)
        assert not comm.all_equal(torch.zeros(2, comm.rank + 1))


@pytest.mark.ranks([1, 2, 3], backend=BACKENDS)
def test_tensors_that_are_reduced_together_equal_single_ones_and_make_few_calls():
    comm = world()
    xs = [torch.full((n,), float(comm.rank + n)) for n in (1, 3, 0, 70_000, 400, 400)]
    xs += [torch.tensor([comm.rank, 4]), torch.ones(3, 2).t() * comm.rank]
    single = [comm.all_reduce(x, "max") for x in xs]
    with trace() as t:
        all_reduce_together(comm, xs, "max", max_mb=0.002)
    assert all(torch.equal(x, y) for x, y in zip(xs, single, strict=True))
    assert len(t.events) == 4  # the large one, two batches of float32, one of int64


def test_a_name_that_was_removed_says_what_to_write_instead():
    for name, words in (("coalesce", r"torch\.cat"), ("tune", "the size of a tensor")):
        assert not hasattr(world(), name)
        with pytest.raises(AttributeError, match=words):
            getattr(world(), name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = world().nothing


def test_verbs_refuse_what_cannot_be_right():
    comm = world()
    x = torch.ones(4, 2)
    for other, ours in (("avg", "mean"), (dist.ReduceOp.AVG, "mean"), ("PROD", "product")):
        with pytest.raises(UnisonoError, match=rf"known are and[\s\S]*HINT: op='{ours}'"):
            comm.all_reduce(x, other)
    with pytest.raises(UnisonoError, match=r"defined for int64: sum, product"):
        comm.all_reduce(torch.ones(2, dtype=torch.int64), "mean")
    with pytest.raises(UnisonoError, match="moved but not added"):
        comm.all_reduce(torch.ones(2).to(torch.float8_e4m3fn))
    with pytest.raises(MeshError, match="0 <= 3 < 1 does not hold"):
        comm.broadcast(x, 3)
    with pytest.raises(PartitionError, match="-2 <= 2 < 2 does not hold"):
        comm.all_gather(x, dim=2)
    with pytest.raises(PartitionError, match="2 entries for 1 ranks"):
        comm.all_gather(x, sizes=[1, 3])
    with pytest.raises(PartitionError, match="3 = 3 != 4"):
        comm.reduce_scatter(x, sizes=[3])
    with pytest.raises(PartitionError, match=r"sizes\[0\] = 3 != 4"):
        comm.all_gather(x, sizes=[3])
    with pytest.raises(UnisonoError, match="no data to move"):
        comm.all_reduce(torch.ones(2, device="meta"))
    with pytest.raises(UnisonoError, match=r"no data to move[\s\S]*to_empty"):
        comm.with_device("meta")
    with pytest.raises(UnisonoError, match="sparse"):
        comm.all_reduce(torch.eye(3).to_sparse())
    with pytest.raises(UnisonoError, match="must be positive"):
        comm.all_reduce(x, timeout_s=0)
    with pytest.raises(UnisonoError, match="a tensor is needed"):
        comm.all_reduce([1, 2])
    with pytest.raises(UnisonoError, match="rank 0 is the source"):
        comm.broadcast(None, like=((2,), torch.float32))
    with pytest.raises(MeshError, match=r"broadcast\(src=0.0\)\n  found: a float, not an int"):
        comm.broadcast(x, 0.0)
    for wrong in (((-1,),), ("ab",), ((2.0,),), (3,), ((2,), "float32")):
        with pytest.raises(UnisonoError, match="no list of sizes, or no dtype that travels"):
            comm.shared_buffer(*wrong)
    for sizes in (4, [4.0], "4", [None]):
        with pytest.raises(PartitionError, match="not a list of integers"):
            comm.all_gather(x, sizes=sizes)
    with pytest.raises(UnisonoError, match=r"x\.view\(torch\.uint8\)"):
        comm.all_gather(torch.zeros(2, dtype=torch.uint8).view(torch.bits8))
    for wrong in ("3", -1.0, float("nan"), float("inf")):
        with pytest.raises(UnisonoError, match="must be positive"):
            comm.start.all_reduce(x).wait(wrong)
    for call in (
        lambda: comm.all_gather(x, timeout_s=-1),
        lambda: comm.all_gather_ints([1], timeout_s=0),
        lambda: comm.scatter(x, timeout_s="soon"),
        lambda: comm.shared_buffer((2,), timeout_s=-1),
    ):
        with pytest.raises(UnisonoError, match="a deadline must be positive"):
            call()
    for sends, recvs in (([(0, x)], {}), ({}, [x])):
        with pytest.raises(TypeError, match="dst: tensor"):
            comm.exchange(sends, recvs)
    with pytest.raises(MeshError, match="integers of 64 bits"):
        comm.split("red")
    with pytest.raises(MeshError, match="not a list of ranks"):
        comm.sub([0.0])
    with pytest.raises(MeshError, match="this is rank 0 itself"):
        comm.send(x, 0)


@pytest.mark.ranks(2, backend=BACKENDS)
def test_integers_of_numpy_are_ranks_dims_sizes_and_tags():
    comm, whole = world(), np.int64
    x, peer = torch.arange(4.0).view(2, 2) + world().rank, whole(1 - world().rank)
    assert torch.equal(comm.broadcast(x, whole(1)), x - comm.rank + 1)
    assert comm.all_gather(x, np.int32(-1), np.array([2, 2])).shape == (2, 4)
    assert comm.scatter(x, np.uint8(0), whole(1)).shape == (2, 1)
    assert list(comm.exchange({peer: x}, {peer: x})) == [1 - comm.rank]
    sent = comm.start.send(x, peer, whole(3))
    assert torch.equal(comm.recv(x, peer, whole(3)), x + 1 - 2 * comm.rank)
    sent.wait()
    assert comm.split(whole(0)).ranks == (0, 1)
    assert comm.shared_buffer((whole(3),)).shape == (3,)
    for wrong in (True, np.bool_(True), 1.0, np.float64(1), "1", None):
        with pytest.raises(MeshError, match="does not hold"):
            comm.broadcast(x, wrong)


@pytest.mark.ranks([2, 3], backend=BACKENDS)
def test_blocks_that_do_not_fit_are_refused_on_all_ranks_alike():
    comm = world()
    with pytest.raises(PartitionError, match=r"rank 1: float32 rows of \[3\]"):
        comm.all_gather(torch.ones(2, 3 if comm.rank == 1 else 2))
    with pytest.raises(PartitionError, match=r"rank 1: float32 rows of \[2\], joined along 1"):
        comm.all_gather(torch.ones(2, 2), dim=min(comm.rank, 1))
    with pytest.raises(PartitionError, match="scatter"):
        comm.scatter(torch.ones(3) if comm.rank == 0 else None, 0, sizes=[1] * comm.size + [9])
    x, peer = torch.ones(2), (comm.rank + 1) % comm.size
    for other in (((1, 2), torch.int32), ((1, 4), torch.float32)):
        if comm.rank == 0:
            with pytest.raises(PartitionError, match="like has rows of"):
                comm.scatter(torch.ones(comm.size, 2), 0, 0, [1] * comm.size, like=other)
    with pytest.raises(PartitionError, match=r"sends \[2\] of torch.float32, receives \[2\] of"):
        comm.exchange({comm.rank: x}, {comm.rank: ((2,), torch.int64)})
    for tag in (-1, "a", 1 << 31, True):
        with pytest.raises(UnisonoError, match="< 2147483648 does not hold"):
            comm.send(x, peer, tag)
    with pytest.raises(UnisonoError, match="neither a tensor nor"):
        comm.recv("x", peer)
    assert comm.all_reduce(torch.ones(1)).item() == comm.size


@pytest.mark.ranks(2, backend=BACKENDS)
def test_what_was_started_in_inference_mode_may_be_waited_for_outside():
    comm = world()
    with torch.inference_mode():
        x = torch.ones(5, dtype=torch.bfloat16)
        started = [comm.start.all_reduce_(x), comm.start.all_reduce_(torch.ones(4)[::2])]
        started += [comm.start.all_reduce(torch.ones(2)), comm.start.broadcast_(torch.ones(4)[::2])]
    assert [p.wait().unique().tolist() for p in started] == [[2.0], [2.0], [2.0], [1.0]]


@pytest.mark.ranks(2, backend=BACKENDS)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_complex_halves_are_added():
    mine = torch.tensor([1 + 2j, 3j]).to(torch.complex32)
    for total in (world().all_reduce(mine), world().all_gather(world().reduce_scatter(mine))):
        assert total.dtype == torch.complex32
        assert total.to(torch.complex64).tolist() == [2 + 4j, 6j]


@pytest.mark.ranks(2)
def test_a_second_thread_inside_a_collective_of_the_group_is_refused():
    comm, other = world(), Communicator.of(torch.distributed.new_group())
    refused: list[str] = []
    entry = comm._entry
    assert other._entry is not entry

    def second() -> None:
        for verb in (comm.all_reduce, comm.all_gather):
            with pytest.raises(UnisonoError) as caught:
                verb(torch.ones(3))
            refused.append(str(caught.value))
        refused.append(str(other.all_reduce(torch.ones(1)).item()))

    entry.inside = threading.get_ident()
    assert entry.turn is not None
    with entry.turn:  # as if this thread were waiting in a collective
        assert comm.all_reduce(torch.ones(1)).item() == 2  # the thread itself may nest calls
        thread = threading.Thread(target=second, name="prefetch")
        thread.start()
        thread.join()
    for text in refused[:2]:
        assert "'prefetch'" in text
        assert "'MainThread'" in text
        assert "new_group" in text
    assert refused[2] == "2.0"
    assert comm.all_reduce(torch.ones(1)).item() == 2


@pytest.mark.ranks(2)
def test_a_verb_under_vmap_is_refused():
    for verb in (world().all_reduce, world().all_gather, world().broadcast):
        with pytest.raises(UnisonoError, match=r"(?s)vmap over .*HINT: give the tensor a batch"):
            torch.func.vmap(verb)(torch.ones(3, 2))


@pytest.mark.ranks(RANKS, backend=BACKENDS)
def test_what_a_verb_replaces_is_not_used_by_autograd_any_more():
    """A backward through values that are gone must raise; it gave 5.437 for 2.718."""
    comm = world()
    changes = [comm.all_reduce_, lambda y: comm.start.all_reduce_(y).wait()]
    if comm.rank != 0:
        changes.append(lambda y: comm.broadcast_(y, src=0))
    for change in changes:
        w = torch.ones(3, dtype=torch.float64, requires_grad=True)
        y = w.exp()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the graph ends here is another test's matter
            change(y)
        with pytest.raises(RuntimeError, match="does not require grad"):
            y.sum().backward()  # what came from the other ranks has no gradient
    if comm.rank == 0:
        comm.broadcast_(torch.ones(3, dtype=torch.float64), src=0)
    for use in (lambda y: comm.all_reduce_(y), lambda y: comm.start.all_reduce_(y).wait()):
        w = torch.ones(3, dtype=torch.float64, requires_grad=True)
        y = w.exp()
        z = y.square()
        with torch.no_grad():
            use(y)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()
    with pytest.raises(UnisonoError, match="view of a tensor in a graph"):
        comm.all_reduce_((torch.ones(4, requires_grad=True) * 2)[1:])


@pytest.mark.ranks(2, backend=BACKENDS)
def test_a_verb_that_cuts_a_graph_says_so_once(monkeypatch):
    monkeypatch.setattr(perform, "_warned", set())
    comm, w = world(), torch.ones(2, requires_grad=True)
    with pytest.warns(UserWarning, match=r"all_reduce of a tensor that requires grad") as told:
        _ = [comm.all_reduce(w * 2) for _ in range(2)]
    assert len(told) == 1
    assert told[0].filename == __file__
    assert "unisono.operators" in str(told[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monkeypatch.setattr(perform, "_warned", set())
        comm.all_reduce((w * 2).detach())
        comm.all_reduce_(w.detach())
        with torch.no_grad():
            comm.all_reduce(w * 2)


@pytest.mark.ranks(2, backend="shm")
def test_torch_calls_of_one_rank_alone_are_noticed_when_the_other_returns():
    """At the deadline only, before; the verbs were noticed after a second."""
    comm = world()
    dist.barrier()
    if comm.rank == 0:
        began = time.monotonic()
        with pytest.raises(CollectiveMismatch, match="cannot complete"):
            dist.barrier()
        assert time.monotonic() - began < 10
    else:
        announce_return(groups.accounts())
