"""The compiled core on its own: ranks are threads, each with a group of its own on one segment."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.waiting import scaled_by_load

from unisono.comm.engines import core
from unisono.comm.engines.rendezvous import slot_bytes_for
from unisono.comm.engines.signature import OPS
from unisono.comm.reductions import DTYPE_NUMBERS, DTYPES, defined_ops
from unisono.errors import UnisonoError

SLOT_BYTES = 4096
REGION_BYTES = 1 << 20
ADDABLE = [dtype for dtype in DTYPES if defined_ops(dtype)]
SIZES = st.sampled_from([0, 1, 3, 100, 511, 513, 1024, 2050, 5000])
WAIT_S = 60.0


def shared(nbytes):
    """Memory as ranks share it."""
    fd = os.memfd_create("unisono-test")
    try:
        os.ftruncate(fd, nbytes)
        return core.load().map(fd, nbytes)
    finally:
        os.close(fd)


class World:
    """Groups of all ranks of one segment, and one buffer in which every rank has a region."""

    def __init__(self, size, small_bytes=None, way=0):
        module = core.load()
        memory = shared(module.layout(size, SLOT_BYTES)[0])
        self.size = size
        self.buffer = shared(size * REGION_BYTES)
        self.groups = [
            module.Group(memory, size, SLOT_BYTES, rank, rank % 2 == 0, self.look, self.report)
            for rank in range(size)
        ]
        for group in self.groups:
            group.add_buffer(self.buffer.address, REGION_BYTES, REGION_BYTES)
            group.way = way
            if small_bytes is not None:
                group.small_bytes = small_bytes
        self.used = [0] * size
        self.errors: list[BaseException] = []

    def look(self, verb, missing, waited_s, timeout_s):
        if waited_s > timeout_s or self.errors:
            raise TimeoutError(f"verb {verb} waits for {missing}")

    def report(self, status, verb, error, rows, table):
        return error if error is not None else ValueError(f"status {status} of verb {verb}: {rows}")

    def tensor(self, rank, like, placed):
        """A copy of a tensor, in the rank's region of the buffer or in memory of its own."""
        nbytes = like.numel() * like.element_size()
        if not placed or not nbytes or self.used[rank] + nbytes > REGION_BYTES:
            return like.clone()
        offset = rank * REGION_BYTES + self.used[rank]
        self.used[rank] += -(-nbytes // 64) * 64
        x = torch.frombuffer(self.buffer, dtype=like.dtype, count=like.numel(), offset=offset)
        return x.copy_(like)

    def run(self, program: Callable[[int, Any], Any]):
        """Run a program on all ranks; return what each returns, raise what one has raised."""
        results: list[Any] = [None] * self.size

        def run_rank(rank):
            try:
                results[rank] = program(rank, self.groups[rank])
            except BaseException as error:
                self.errors.append(error)

        threads = [threading.Thread(target=run_rank, args=(r,)) for r in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]
        return results

    def close(self):
        for group in self.groups:
            group.close()
            group.release()


def listed(blocks):
    return [(x.data_ptr(), x.numel() * x.element_size()) for x in blocks]


def block(seed, n, dtype):
    """What a rank brings: whole numbers and fractions, without infinities."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_complex:
        parts = [block(seed + k, n, torch.float32) for k in (1, 2)]
        return torch.complex(*parts).to(dtype)
    if dtype.is_floating_point:
        return (torch.randn(n, generator=generator) * 3).to(dtype)
    if dtype == torch.bool:
        return torch.randint(0, 2, (n,), generator=generator).bool()
    raw = torch.randint(0, 256, (n * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype)


def folded(blocks, op):
    """The reduction in rank order by torch and numpy in one process."""
    dtype = blocks[0].dtype
    if dtype == torch.bool:
        op = {"sum": "or", "max": "or", "product": "and", "min": "and"}.get(op, op)
    if not (dtype.is_floating_point or dtype.is_complex):
        names = {"sum": "add", "product": "multiply", "min": "minimum", "max": "maximum"}
        fold = getattr(np, names.get(op) or f"bitwise_{op}")
        total = blocks[0].numpy()
        for x in blocks[1:]:
            total = fold(total, x.numpy())
        return torch.from_numpy(np.array(total)).view(dtype)
    wide = dtype
    if dtype in (torch.float16, torch.bfloat16):
        wide = torch.float32
    if dtype == torch.complex32:
        wide = torch.complex64
    if op == "sum64":
        wide = torch.float64
    fold = {"product": torch.mul, "min": torch.minimum, "max": torch.maximum}.get(op, torch.add)
    total = blocks[0].to(wide)
    for x in blocks[1:]:
        total = fold(total, x.to(wide))
    if op == "mean":
        parts = torch.view_as_real(total) if dtype.is_complex else total
        total = (
            torch.view_as_complex(parts / len(blocks)) if dtype.is_complex else parts / len(blocks)
        )
    return total.to(dtype)


def same(x, y):
    if not x.numel():
        return x.shape == y.shape
    return torch.equal(x.view(torch.uint8), y.view(torch.uint8))


class Script:
    """One random call, the same on all ranks: what each brings, and what each must get."""

    def __init__(self, world, verb, dtype, op, sizes, root, placed, seed):
        self.world, self.verb, self.dtype, self.op = world, verb, dtype, op
        size = world.size
        self.sizes, self.root, self.placed, self.seed = sizes[:size], root % size, placed, seed

    def bring(self, rank, part=0, n=None):
        n = self.sizes[0] if n is None else n
        return block(self.seed * 1000 + rank * 10 + part * 100, n, self.dtype)

    def _rows(self, owner):
        """Blocks of one rank for all, in one piece of memory."""
        return [self.bring(owner, q, n) for q, n in enumerate(self.sizes)]

    def start(self, rank, group, mode):
        """Make the call; return the call under way, and a check of what has come."""
        number = DTYPE_NUMBERS[self.dtype]
        placed = self.placed[rank]
        size, root, sizes = self.world.size, self.root, self.sizes
        if self.verb == "barrier":
            return group.barrier(mode, WAIT_S), lambda: True
        if self.verb in ("all_reduce", "reduce"):
            to = -1 if self.verb == "all_reduce" else root
            x = self.world.tensor(rank, self.bring(rank), placed)
            wanted = folded([self.bring(r) for r in range(size)], self.op)
            if to not in (-1, rank):
                wanted = self.bring(rank)
            op = OPS.index(self.op)
            call = group.all_reduce(mode, WAIT_S, x.data_ptr(), x.numel(), number, op, to)
            return call, lambda: self.is_near(x, wanted)
        if self.verb == "broadcast":
            x = self.world.tensor(rank, self.bring(rank), placed)
            nbytes = x.numel() * x.element_size()
            call = group.broadcast(mode, WAIT_S, x.data_ptr(), nbytes, number, root)
            return call, lambda: same(x, self.bring(root))
        if self.verb in ("all_gather", "gather"):
            x = self.world.tensor(rank, self.bring(rank, n=sizes[rank]), placed)
            outs = [torch.empty(n, dtype=self.dtype) for n in sizes]
            if self.verb == "all_gather":
                call = group.all_gather(mode, WAIT_S, listed(outs), x.data_ptr(), number, 7)
            else:
                mine = listed(outs) if rank == root else None
                nbytes = x.numel() * x.element_size()
                call = group.gather(mode, WAIT_S, mine, x.data_ptr(), nbytes, number, root)
                outs = outs if rank == root else []
            return (
                call,
                lambda: (
                    x is not None
                    and all(same(out, self.bring(r, n=sizes[r])) for r, out in enumerate(outs))
                ),
            )
        whole = self.world.tensor(rank, torch.cat(self._rows(rank)), placed)
        rows = list(whole.split(list(sizes)))
        if self.verb == "reduce_scatter":
            out = torch.empty(sizes[rank], dtype=self.dtype)
            blocks = [self.bring(r, rank, sizes[rank]) for r in range(size)]
            op = OPS.index(self.op)
            call = group.reduce_scatter(mode, WAIT_S, out.data_ptr(), listed(rows), number, op, 0)
            return call, lambda: self.is_near(out, folded(blocks, self.op)) and whole is not None
        if self.verb == "scatter":
            out = torch.empty(sizes[rank], dtype=self.dtype)
            mine = listed(rows) if rank == root else None
            nbytes = out.numel() * out.element_size()
            call = group.scatter(mode, WAIT_S, out.data_ptr(), nbytes, mine, number, root)
            return call, lambda: same(out, self.bring(root, rank, sizes[rank])) and bool(rows)
        # all_to_all: rank r sends its block q, of rank q's size, to rank q
        outs = [torch.empty(sizes[rank], dtype=self.dtype) for _ in range(size)]
        call = group.all_to_all(mode, WAIT_S, listed(outs), listed(rows), number)
        return (
            call,
            lambda: (
                bool(rows)
                and all(same(out, self.bring(r, rank, sizes[rank])) for r, out in enumerate(outs))
            ),
        )

    def is_near(self, x, wanted):
        """Bits, but for the product of complex numbers, whose terms processors add differently."""
        if self.dtype.is_complex and self.op == "product":
            return torch.allclose(x.to(torch.complex128), wanted.to(torch.complex128), rtol=1e-2)
        if self.op in ("min", "max"):  # of 0 and -0 both are the smaller one
            return bool((x == wanted).all()) if x.dtype != torch.bool else torch.equal(x, wanted)
        return same(x, wanted)


VERBS = [
    "barrier",
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "gather",
    "reduce_scatter",
    "scatter",
    "all_to_all",
    "message",
]


@st.composite
def calls(draw):
    dtype = draw(st.sampled_from(ADDABLE))
    return (
        draw(st.sampled_from(VERBS)),
        dtype,
        draw(st.sampled_from(defined_ops(dtype))),
        draw(st.lists(SIZES, min_size=8, max_size=8)),
        draw(st.integers(0, 7)),
        draw(st.sampled_from(["none", "all", "even", "first"])),
        draw(st.integers(0, 10**6)),
    )


def row(peer, x):
    """Return what a message is told by: of a slice also its shape and strides."""
    if x.is_contiguous():
        return peer, x, x.data_ptr(), x.nbytes, 0
    return peer, x, x.data_ptr(), x.itemsize, 0, x.shape, x.stride()


def laid_out(x, kind):
    """Return the values of a matrix in memory with room between them, or in another order."""
    rows, columns = x.shape
    lies = [
        lambda: torch.empty(rows, columns),
        lambda: torch.full((rows, columns + 5), 7.0)[:, 2 : 2 + columns],
        lambda: torch.full((2 * rows, 3, columns), 7.0)[::2, 1],
        lambda: torch.empty(columns, rows).t(),
        lambda: torch.full((rows, 2 * columns), 7.0)[:, ::2],
    ][kind % 5]()
    return lies.copy_(x)


def exchange(world, rank, group, seed, n, tag):
    """Send to the next rank, receive from the one before, or from anybody; slices too."""
    size, columns = world.size, n // 17
    x = laid_out(block(seed + rank, n, torch.float32).view(17, columns), seed // 7)
    y = laid_out(torch.zeros(17, columns), seed // 11)
    source = -1 if seed % 2 else (rank - 1) % size
    transfers = group.post([row((rank + 1) % size, x)], [row(source, y)], tag, seed % 3 == 0)
    wanted = block(seed + (rank - 1) % size, n, torch.float32)

    def check():
        transfers.wait(WAIT_S)
        assert transfers.source == (rank - 1) % size
        around = y if y._base is None else y._base
        y_values, _ = y.clone(), y.fill_(7.0)
        return same(y_values.reshape(-1), wanted) and bool((around == 7.0).all())

    return check


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
@given(
    size=st.integers(2, 8),
    small_bytes=st.sampled_from([0, 1000, 4096]),
    way=st.integers(0, 2),
    program=st.lists(calls(), min_size=1, max_size=10),
    started=st.integers(0, 2**32 - 1),
)
def test_any_sequence_of_calls_gives_what_one_process_computes(
    size, small_bytes, way, program, started
):
    world = World(size, small_bytes, way)
    places = {
        "none": [False] * size,
        "all": [True] * size,
        "even": [r % 2 == 0 for r in range(size)],
        "first": [r == 0 for r in range(size)],
    }

    def run_rank(rank, group):
        under_way = []
        for number, (verb, dtype, op, sizes, root, placing, seed) in enumerate(program):
            bit = started >> (number + 3 * rank) & 1  # each rank has its own mind about waiting
            if verb == "message":
                check = exchange(world, rank, group, seed, sizes[0] * 17, number)
                under_way.append((None, check))
            else:
                script = Script(world, verb, dtype, op, sizes, root, places[placing], seed)
                under_way.append(script.start(rank, group, True if bit else None))
            if bit and number % 3 == 2:
                yielded = under_way
                under_way = []
                finish(yielded, program)
        finish(under_way, program)

    def finish(calls_under_way, program):
        for call, check in calls_under_way:
            if call is not None:
                call.wait(WAIT_S)
            assert check(), program

    world.run(run_rank)
    world.close()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_number_of_sixteen_bits_is_converted_as_torch_does(dtype):
    every = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(dtype)
    others = [-0.0, 2.0**-24, 6e-8, 1 / 3, 1.0, -1.0009765625, 1000.0, 65504.0, float("inf")]
    pair = every.repeat(len(others)), torch.tensor(others).to(dtype).repeat_interleave(len(every))
    world = World(2)
    for op in ("sum", "product", "sum64", "mean", "min", "max"):

        def run_rank(rank, group, op=op):
            x = pair[rank].clone()
            number, op = DTYPE_NUMBERS[dtype], OPS.index(op)
            group.all_reduce(None, WAIT_S, x.data_ptr(), x.numel(), number, op, -1)
            return x

        reduced, also = world.run(run_rank)
        assert same(reduced, also)
        expected = folded(list(pair), op)
        assert torch.equal(reduced.isnan(), expected.isnan())
        numbers = ~expected.isnan()
        assert torch.equal(reduced[numbers], expected[numbers]), op
        if op == "sum":  # -0.0 changes nothing, not even the sign of zero
            unchanged, numbers = reduced[: len(every)], numbers[: len(every)]
            assert same(unchanged[numbers], every[numbers])
    world.close()


def test_a_nan_of_any_rank_is_in_the_minimum_and_maximum():
    world = World(3)
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        for op in ("min", "max"):
            for n in (3, 3000):

                def run_rank(rank, group, dtype=dtype, op=op, n=n):
                    x = torch.full((n,), float(rank), dtype=dtype)
                    x[rank] = float("nan")
                    number, op = DTYPE_NUMBERS[dtype], OPS.index(op)
                    group.all_reduce(None, WAIT_S, x.data_ptr(), n, number, op, -1)
                    return x

                for x in world.run(run_rank):
                    assert x[:3].isnan().all()
                    assert not x[3:].isnan().any()
    world.close()


def test_a_buffer_that_one_rank_has_dropped_is_read_through_slots():
    for size in (2, 3):
        world = World(size)
        world.groups[0].drop_buffer(1)  # its tensor there has died; the others still use theirs

        def run_rank(rank, group, world=world, size=size):
            sizes = [3000] * 8
            for seed, verb in enumerate(VERBS[1:-1]):
                for root in range(size):
                    script = Script(
                        world, verb, torch.float32, "sum", sizes, root, [True] * size, seed
                    )
                    script.placed = [r > 0 for r in range(size)]
                    _, check = script.start(rank, group, None)
                    assert check(), (verb, root)
                    world.used[rank] = 0

        world.run(run_rank)
        world.close()


def test_started_calls_run_in_order_and_tell_when_they_have_ended():
    world = World(2)

    def run_rank(rank, group):
        told = []
        xs = [torch.full((n,), 1.0) for n in (3, 60_000, 5)]
        started = [group.all_reduce(True, WAIT_S, x.data_ptr(), x.numel(), 0, 0, -1) for x in xs]
        for number, call in enumerate(started):
            call.then(lambda number=number: told.append(number))
        group.barrier(None, WAIT_S)
        assert [call.done() for call in started] == [True] * 3
        for x in xs:
            assert x.unique().tolist() == [2.0]
        end = time.monotonic() + 10
        while len(told) < 3 and time.monotonic() < end:
            time.sleep(0.001)
        assert sorted(told) == [0, 1, 2]

    world.run(run_rank)
    world.close()


def test_calls_made_by_callbacks_come_in_one_order_on_all_ranks():
    """A call of a callback stands before the next call of the rank, however fast each rank is."""
    world = World(3)
    rounds = 40

    def run_rank(rank, group):
        naps = random.Random(rank)
        order = []

        def nap():
            if naps.random() < 0.4:
                time.sleep(naps.random() * 2e-3)

        for n in range(rounds):
            first, second, last = (torch.full((size,), float(rank)) for size in (5, 3, 9_000))

            def inner(n=n, second=second):
                group.broadcast(None, WAIT_S, second.data_ptr(), second.nbytes, 0, n % 3)
                order.append(second.tolist())

            call = group.all_reduce(True, WAIT_S, first.data_ptr(), 5, 0, 0, -1)
            nap()
            call.then(inner)
            nap()
            group.all_reduce(True, WAIT_S, last.data_ptr(), 9_000, 0, 0, -1).wait(WAIT_S)
            assert len(order) == n + 1, "the callback's call came after the next one"
            assert last.unique().tolist() == [3.0]
        assert order == [[float(n % 3)] * 3 for n in range(rounds)]

    world.run(run_rank)
    world.close()


def test_memory_of_a_receive_that_was_given_up_is_not_written_any_more():
    world = World(2)

    def run_rank(rank, group):
        x = torch.zeros(50) if rank == 0 else torch.ones(50)
        if rank == 0:
            given_up = group.post([], [(1, x, x.data_ptr(), x.nbytes, 0)], 1, True)
            with pytest.raises(TimeoutError):
                given_up.wait(0.1)
        group.barrier(None, WAIT_S)
        if rank == 1:
            group.post([(0, x, x.data_ptr(), x.nbytes, 0)], [], 1, True).wait(WAIT_S)
            group.post([(0, x, x.data_ptr(), x.nbytes, 0)], [], 2, True).wait(WAIT_S)
        else:
            y = torch.zeros(50)
            group.post([], [(1, y, y.data_ptr(), y.nbytes, 0)], 2, True).wait(WAIT_S)
            assert y.sum() == 50  # it came after the message with the other tag
            assert x.sum() == 0

    world.run(run_rank)
    world.close()


def test_calls_that_differ_are_told_to_all_ranks():
    world = World(2)

    def run_rank(rank, group):
        x = torch.ones(4 + rank)
        with pytest.raises(ValueError, match="status 1"):
            group.all_reduce(None, WAIT_S, x.data_ptr(), x.numel(), 0, 0, -1)

    world.run(run_rank)
    world.close()


def test_arguments_that_would_touch_foreign_memory_are_refused_before_any_meeting():
    world = World(2)
    group, x = world.groups[0], torch.ones(4)
    at, pair = x.data_ptr(), listed([x, x])
    null = [(0, 16), (at, 16)]
    for name, *arguments in (
        ("all_reduce", 0, 4, 0, 0, -1),
        ("all_reduce", at, 4, 0, 0, 2),
        ("all_reduce", at, 1 << 62, 0, 0, -1),
        ("reduce_scatter", at, null, 0, 0, 0),
        ("reduce_scatter", 0, pair, 0, 0, 0),
        ("reduce_scatter", at, None, 0, 0, 0),
        ("broadcast", 0, 16, 0, 0),
        ("broadcast", at, 16, 0, -1),
        ("all_gather", pair, 0, 0, 0),
        ("all_gather", null, at, 0, 0),
        ("all_gather", pair[:1], at, 0, 0),
        ("gather", None, at, 16, 0, 0),
        ("gather", pair, 0, 16, 0, 1),
        ("scatter", 0, 16, pair, 0, 0),
        ("scatter", at, 16, None, 0, 0),
        ("all_to_all", null, pair, 0),
        ("all_to_all", pair, [*pair, *pair], 0),
    ):
        with pytest.raises(ValueError, match=r"memory|rank|root"):
            getattr(group, name)(None, WAIT_S, *arguments)
    with pytest.raises(ValueError, match="memory"):
        group.post([(1, x, 0, 16, 0)], [], 0, True)
    with pytest.raises(ValueError, match="rank"):
        group.state(2)
    with pytest.raises(ValueError, match="state"):
        group.fail(9, 0, b"")
    with pytest.raises(ValueError, match="way"):
        group.way = 3
    world.run(lambda rank, group: group.barrier(None, WAIT_S))
    world.close()


@pytest.mark.parametrize("is_started", [False, True])
def test_a_lack_of_memory_in_the_core_is_an_exception_of_the_call(is_started):
    world = World(2)

    def run_rank(rank, group):
        x = torch.ones(20_000)
        if rank == 0:
            group.fault_after(5, 0)
        arguments = (1.0, x.data_ptr(), x.numel(), 0, 0, -1)

        def call():
            started = group.all_reduce(x if is_started else None, *arguments)
            return started and started.wait(WAIT_S)

        with pytest.raises(MemoryError if rank == 0 else TimeoutError):
            call()

    world.run(run_rank)
    world.close()


@pytest.mark.parametrize("is_run_by_thread", [False, True])
def test_a_call_behind_another_hears_signals(is_run_by_thread):
    """Whoever waits runs the calls before its own; then the signal comes in the midst of those."""
    world = World(2)
    group, x = world.groups[0], torch.ones(4)
    group.all_reduce(x, 10.0, x.data_ptr(), 4, 0, 0, -1)  # the other rank never comes
    if is_run_by_thread:
        time.sleep(0.2)

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    began = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            group.barrier(None, 10.0)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - began < scaled_by_load(5)
    world.errors.append(KeyboardInterrupt())  # ends what the thread waits for
    world.close()


def test_slots_hold_a_line_for_every_other_rank(monkeypatch):
    monkeypatch.setenv("UNISONO_SHM_SLOT_KB", "4")
    assert slot_bytes_for(66) // 65 >= 64
    module = core.load()
    memory = shared(module.layout(66, SLOT_BYTES)[0])
    with pytest.raises(ValueError, match="64 bytes"):
        module.Group(memory, 66, SLOT_BYTES, 0, True, print, print)


IDLE_S = 1.2


@pytest.mark.parametrize("kind", ["collective", "started", "message", "message behind"])
def test_an_idle_wait_costs_little(kind):
    world = World(2)
    spent = []

    def run_rank(rank, group):
        x = torch.ones(100_000)
        if rank == 1:
            time.sleep(IDLE_S)
        began = time.thread_time(), time.process_time()
        if kind == "message behind":  # larger than a ring: the group's thread looks after it
            mine, theirs = [(1 - rank, x, x.data_ptr(), x.nbytes, 0)], x.clone()
            recvs = [(1 - rank, theirs, theirs.data_ptr(), x.nbytes, 0)]
            transfers = group.post(mine, recvs, 0, False)
            if rank == 0:
                time.sleep(IDLE_S)
            transfers.wait(WAIT_S)
        elif kind == "message":
            row = [(1 - rank, x, x.data_ptr(), x.nbytes, 0)]
            group.post(row if rank else [], [] if rank else row, 0, True).wait(WAIT_S)
        else:
            call = group.barrier(True if kind == "started" else None, WAIT_S)
            if call is not None:
                call.wait(WAIT_S)
        if rank == 0:
            spent.append(time.process_time() - began[1])

    world.run(run_rank)
    world.close()
    assert spent[0] < 0.04 * IDLE_S


def test_a_core_of_another_version_is_not_used(monkeypatch):
    monkeypatch.setattr(core, "VERSION", core.VERSION + 1)
    core._loaded.cache_clear()
    try:
        assert "build it again" in (core.unavailable() or "")
        with pytest.raises(UnisonoError, match="version"):
            core.load()
    finally:
        core._loaded.cache_clear()
