"""Every verb of the MPI-style communicator against numpy, over gloo and shared memory.

`transports/test_mpi.py` runs the same on ranks of `mpiexec`, over the MPI transport.
"""

from __future__ import annotations

import operator
import time
from functools import reduce

import numpy as np
import pytest
import torch

from unisono.comm import world
from unisono.comm.mpi_style import (
    MPI,
    MPI_SELF,
    MPI_WORLD,
    MPICommunication,
    Request,
    Status,
)
from unisono.errors import MeshError, RankTimeout, UnisonoError

BACKENDS = ["gloo", "shm"]
SHAPE = (2, 3, 4)
BIG = 50_000
"""Elements of a message that a backend may not send before it is received."""


def block(rank, shape=SHAPE, dtype=torch.float32):
    """What a rank brings: small whole numbers, other ones on each rank."""
    n = int(torch.Size(shape).numel())
    return ((torch.arange(n) * 7 + rank * 3) % 5).reshape(shape).to(dtype)


def strided(x):
    """Return a tensor equal to `x` whose memory is neither dense nor in order."""
    wide = torch.zeros(*x.shape[:-1], x.shape[-1] * 2, dtype=x.dtype).movedim(0, -1).contiguous()
    view = wide.movedim(-1, 0)[..., ::2]
    view.copy_(x)
    assert not view.is_contiguous() or view.numel() < 2
    return view


def both(comm, verb):
    """Return the blocking verb and its twin, followed by a wait, alternately `Wait` and `wait`."""

    def later(*args, **kwargs):
        request = getattr(comm, f"I{verb.lower()}")(*args, **kwargs)
        assert isinstance(request, Request)
        (request.Wait if len(verb) % 2 else request.wait)()
        assert request.Test()
        assert request.test()

    return getattr(comm, verb), later


def numbers(x):
    return x.to(torch.float64).numpy() if x.dtype == torch.bfloat16 else x.numpy()


OPS = {
    MPI.SUM: operator.add,
    MPI.PROD: operator.mul,
    MPI.MIN: np.minimum,
    MPI.MAX: np.maximum,
    MPI.LAND: np.logical_and,
    MPI.LOR: np.logical_or,
    MPI.LXOR: np.logical_xor,
    MPI.BAND: np.bitwise_and,
    MPI.BOR: np.bitwise_or,
    MPI.BXOR: np.bitwise_xor,
}
LEGAL = {
    torch.float32: [op for op in OPS if not op.name.startswith("B")],
    torch.float64: [MPI.SUM, MPI.MAX],
    torch.bfloat16: [MPI.SUM, MPI.PROD, MPI.MIN, MPI.LAND],
    torch.int64: list(OPS),
    torch.uint8: [MPI.SUM, MPI.BXOR, MPI.LXOR],
    torch.bool: [op for op in OPS if op is not MPI.PROD],
    torch.complex64: [MPI.SUM, MPI.PROD, MPI.LOR],
}


@pytest.mark.ranks([1, 2, 3, 4], backend=BACKENDS)
def test_reductions_and_scans_of_every_op_and_dtype_equal_numpy():
    comm = MPI_WORLD
    root = comm.size - 1
    for dtype, ops in LEGAL.items():
        blocks = [block(r, SHAPE, dtype) for r in range(comm.size)]
        for op in ops:

            def total(ranks, op=op, blocks=blocks, dtype=dtype):
                found = reduce(OPS[op], [numbers(b) for b in blocks[:ranks]])
                if op.is_logical:
                    found = found != 0
                return torch.from_numpy(np.asarray(found)).to(dtype)

            # Where memory lies is nothing to an operation: one for each dtype shows it.
            for make in (torch.clone, strided) if op is ops[0] else (torch.clone,):
                mine = make(blocks[comm.rank])
                for verb, ranks in (
                    ("Allreduce", comm.size),
                    ("Scan", comm.rank + 1),
                    ("Exscan", comm.rank),
                ):
                    for call in both(comm, verb):
                        out = make(torch.zeros(SHAPE, dtype=dtype))
                        call(mine, out, op)
                        expected = total(ranks) if ranks else torch.zeros(SHAPE, dtype=dtype)
                        assert torch.equal(out, expected), (verb, dtype, op)
                        assert torch.equal(mine, blocks[comm.rank])
                for call in both(comm, "Reduce"):
                    out = make(torch.zeros(SHAPE, dtype=dtype))
                    call(mine, out if comm.rank == root else None, op, root=root)
                    if comm.rank == root:
                        assert torch.equal(out, total(comm.size)), (dtype, op)


@pytest.mark.ranks([2, 3], backend=BACKENDS)
def test_half_precision_sums_are_sums_and_in_place_numpy_and_shapes_of_one_size_work():
    comm = MPI_WORLD
    values = torch.tensor([1.5 if comm.rank == 0 else 3.0], dtype=torch.bfloat16)
    comm.Allreduce(MPI.IN_PLACE, values)
    assert values.item() == 1.5 + 3.0 * (comm.size - 1)
    array = np.arange(6.0).reshape(2, 3)
    flat = np.empty(6)
    comm.Allreduce(array, flat, op=MPI.SUM)
    assert np.array_equal(flat, np.arange(6.0) * comm.size)
    comm.Reduce(MPI.IN_PLACE, array, root=1)
    assert np.array_equal(array.ravel(), flat if comm.rank == 1 else np.arange(6.0))
    transposed = np.zeros((3, 2)).T
    comm.Bcast(transposed if comm.rank else np.ones((2, 3)))
    assert transposed.sum() == (6 if comm.rank else 0)
    weight = torch.nn.Parameter(torch.ones(2))
    comm.Allreduce(MPI.IN_PLACE, weight)
    assert weight.tolist() == [comm.size] * 2
    empty = torch.empty(0)
    comm.Allreduce(empty, empty.clone())
    comm.Scan(empty, empty.clone())


@pytest.mark.ranks([1, 2, 3, 4], backend=BACKENDS)
def test_bcast_gathers_and_scatters_along_every_axis_equal_numpy():
    comm = MPI_WORLD
    size, rank, root = comm.size, comm.rank, comm.size // 2
    ways = {torch.float32: (torch.clone, strided), torch.bfloat16: (strided,)}
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.complex64):
        for make in ways.get(dtype, (torch.clone,)):
            blocks = [block(r, SHAPE, dtype) for r in range(size)]
            mine = make(blocks[rank])
            for call in both(comm, "Bcast"):
                buf = make(blocks[rank])
                call(buf, root=root)
                assert torch.equal(buf, blocks[root])
            for axis in range(3):
                joined = torch.cat(blocks, dim=axis)
                for call in both(comm, "Allgather"):
                    out = make(torch.zeros_like(joined))
                    strides = out.stride()
                    call(mine, out, recv_axis=axis)
                    assert torch.equal(out, joined), axis
                    assert out.stride() == strides
                for recv_axis in (None, 0, 1, 2):
                    fronts = torch.cat([b.swapaxes(0, axis) for b in blocks])
                    whole = fronts.swapaxes(0, axis if recv_axis is None else recv_axis)
                    for call in both(comm, "Gather"):
                        out = make(torch.zeros(whole.shape, dtype=dtype))
                        call(mine, out if rank == root else None, root, axis, recv_axis)
                        assert rank != root or torch.equal(out, whole), (axis, recv_axis)
                    part = torch.cat(blocks, axis).swapaxes(0, axis).chunk(size)[rank]
                    part = part.swapaxes(0, axis if recv_axis is None else recv_axis)
                    for call in both(comm, "Scatter"):
                        out = make(torch.zeros(part.shape, dtype=dtype))
                        source = make(torch.cat(blocks, axis)) if rank == root else None
                        call(source, out, root, axis, recv_axis)
                        assert torch.equal(out, part), (axis, recv_axis)


@pytest.mark.ranks([2, 3, 4], backend=BACKENDS)
def test_blocks_of_different_lengths_go_to_their_displacements():
    comm = MPI_WORLD
    size, rank, root = comm.size, comm.rank, 1
    counts = [r % 3 for r in range(size)]  # 0 1 2 0
    displs = [sum(counts[r + 1 :]) + 1 for r in range(size)]  # the other way round, and a gap
    total = sum(counts) + 1
    for axis in range(3):
        shapes = [[2, 3, 4] for _ in range(size)]
        for r in range(size):
            shapes[r][axis] = counts[r]
        blocks = [block(r, tuple(shapes[r])) + r for r in range(size)]
        whole_shape = [2, 3, 4]
        whole_shape[axis] = total
        expected = torch.full(whole_shape, -1.0)
        for r in range(size):
            expected.narrow(axis, displs[r], counts[r]).copy_(blocks[r])
        for make in (torch.clone, strided):
            mine = make(blocks[rank]) if blocks[rank].numel() else blocks[rank]
            for call in both(comm, "Allgatherv"):
                out = make(torch.full(whole_shape, -1.0))
                call(mine, (out, counts, displs), recv_axis=axis)
                assert torch.equal(out, expected)
            for call in both(comm, "Gatherv"):
                out = make(torch.full(whole_shape, -1.0))
                target = (out, (counts, displs)) if rank == root else None
                call(mine, target, root=root, axis=axis)
                assert rank != root or torch.equal(out, expected)
            for call in both(comm, "Scatterv"):
                out = torch.zeros(shapes[rank])
                source = (make(expected), counts, displs) if rank == root else None
                call(source, out, root=root, axis=axis)
                assert torch.equal(out, blocks[rank])
        simple = torch.zeros(*[n - (d == axis) for d, n in enumerate(whole_shape)])
        comm.Allgatherv(blocks[rank], simple, recv_axis=axis)
        assert torch.equal(simple, torch.cat(blocks, axis))
        comm.Gatherv(blocks[rank], simple.zero_() if rank == root else None, root, axis)
        assert rank != root or torch.equal(simple, torch.cat(blocks, axis))


@pytest.mark.ranks([2, 3], backend=BACKENDS)
def test_gathers_in_place_take_the_own_block_from_the_receive_buffer():
    comm = MPI_WORLD
    size, rank = comm.size, comm.rank
    blocks = [block(r, (2, 3)) for r in range(size)]
    out = torch.zeros(2 * size, 3)
    out[2 * rank : 2 * rank + 2] = blocks[rank]
    comm.Allgather(MPI.IN_PLACE, out)
    assert torch.equal(out, torch.cat(blocks))
    rows = torch.zeros(size, 2, 3)
    comm.Allgather(blocks[rank], rows)  # a new axis in front is the same memory
    assert torch.equal(rows, torch.stack(blocks))
    gathered = torch.zeros(2 * size, 3)
    gathered[:2] = blocks[0]
    comm.Gather(MPI.IN_PLACE if rank == 0 else blocks[rank], gathered if rank == 0 else None)
    assert rank != 0 or torch.equal(gathered, torch.cat(blocks))
    part = torch.zeros(2, 3)
    comm.Scatter(out if rank == 0 else None, MPI.IN_PLACE if rank == 0 else part)
    assert rank == 0 or torch.equal(part, blocks[rank])
    swapped = torch.arange(size) + 10 * rank
    comm.Alltoall(MPI.IN_PLACE, swapped)
    assert swapped.tolist() == [10 * r + rank for r in range(size)]


@pytest.mark.ranks([1, 2, 3, 4], backend=BACKENDS)
def test_alltoall_turns_an_array_split_along_one_axis_into_one_split_along_another():
    comm = MPI_WORLD
    whole = torch.arange(5 * 6 * 7).reshape(5, 6, 7)
    ways = {torch.float32: (torch.clone, strided), torch.bfloat16: (torch.clone,)}
    for dtype, makes in ways.items():
        for send_axis in range(3):
            for recv_axis in range(3):
                if send_axis == recv_axis:
                    continue
                before = whole[comm.chunk(whole.shape, recv_axis)[2]].to(dtype)
                after = whole[comm.chunk(whole.shape, send_axis)[2]].to(dtype)
                for make in makes:
                    for call in both(comm, "Alltoall"):
                        out = make(torch.zeros(after.shape, dtype=dtype))
                        call(make(before), out, send_axis=send_axis, recv_axis=recv_axis)
                        assert torch.equal(out, after), (send_axis, recv_axis)


@pytest.mark.ranks([2, 3, 4], backend=BACKENDS)
def test_alltoall_along_one_axis_exchanges_blocks_also_uneven_ones():
    comm = MPI_WORLD
    size, rank = comm.size, comm.rank
    for axis in range(3):
        for length in (2 * size, 2 * size + 1):
            shape = [2, 3, 4]
            shape[axis] = length
            blocks = [block(r, tuple(shape)) + 10 * r for r in range(size)]
            parts = [b[comm.chunk(b.shape, axis)[2]] for b in blocks]
            expected = torch.cat(parts, axis)
            for call in both(comm, "Alltoall"):
                out = strided(torch.zeros(expected.shape))
                call(strided(blocks[rank]), out, send_axis=axis)
                assert torch.equal(out, expected)
    counts = [[(r + q) % 3 for q in range(size)] for r in range(size)]  # r sends to q
    for axis in range(3):
        shape = [2, 3, 4]
        shape[axis] = sum(counts[rank])
        mine = (block(rank, tuple(shape)) + 10 * rank).contiguous()
        everybody = comm.allgather(mine)
        begins = [sum(counts[r][:rank]) for r in range(size)]
        parts = [everybody[r].narrow(axis, begins[r], counts[r][rank]) for r in range(size)]
        got = [counts[r][rank] for r in range(size)]
        displs = [sum(got[r + 1 :]) for r in range(size)]  # in reverse order
        for call in both(comm, "Alltoallv"):
            out = torch.zeros(torch.cat(parts, axis).shape)
            call((mine, counts[rank]), (out, got, displs), send_axis=axis)
            assert torch.equal(out, torch.cat(parts[::-1], axis))


@pytest.mark.ranks([2, 3], backend=BACKENDS)
def test_messages_match_by_source_and_tag_in_the_order_of_sending():
    comm = MPI_WORLD
    size, rank = comm.size, comm.rank
    right, left = (rank + 1) % size, (rank - 1) % size
    for n in (3, BIG):
        for kind in ("Send", "Bsend", "Rsend"):
            for number in range(3):
                getattr(comm, kind)(torch.full((n,), 10.0 * rank + number), right, tag=number % 2)
            comm.send(("object", rank), right, tag=7)
            assert comm.recv(None, left, 7) == ("object", left)  # the others wait
            out, status = torch.zeros(n), Status()
            comm.Recv(out, source=left, tag=1, status=status)
            assert out.unique().tolist() == [10.0 * left + 1]
            assert (status.source, status.tag, status.count) == (left, 1, n)
            for number in (0, 2):
                comm.Recv(out, left, 0)
                assert out.unique().tolist() == [10.0 * left + number]
    comm.Barrier()


@pytest.mark.ranks(2, backend=BACKENDS)
def test_messages_into_strided_buffers_of_other_dtypes_and_without_elements():
    comm = MPI_WORLD
    other = 1 - comm.rank
    for dtype in (torch.bfloat16, torch.bool, torch.complex64, torch.uint8):
        for shape in ((2, 3), (300, 40)):
            comm.Send(strided(block(comm.rank, shape, dtype)), other)
            out = strided(torch.zeros(shape, dtype=dtype))
            comm.Recv(out, other)
            assert torch.equal(out, block(other, shape, dtype))
    comm.Send(torch.empty(0), other)
    comm.Recv(torch.empty(0), other)
    scalar = torch.tensor(0.0)
    comm.Send(torch.tensor(2.5), other)
    comm.Recv(scalar, other)
    assert scalar.item() == 2.5


@pytest.mark.ranks(2, backend=BACKENDS)
def test_receives_posted_early_complete_inside_other_waits():
    comm = MPI_WORLD
    other = 1 - comm.rank
    for n in (4, BIG):
        outs = [torch.zeros(n) for _ in range(3)]
        requests = [comm.Irecv(out, other, tag) for tag, out in enumerate(outs)]
        assert not requests[0].Test()
        comm.Barrier()
        sends = [comm.Isend(torch.full((n,), tag + 0.5), other, tag) for tag in (2, 0, 1)]
        Request.Waitall(sends + requests)
        assert [out.unique().tolist() for out in outs] == [[0.5], [1.5], [2.5]]
    # Rank 0 is in a collective while rank 1 waits until its message has gone.
    out, total = torch.zeros(BIG), torch.ones(1)
    if comm.rank == 0:
        request = comm.Irecv(out, 1)
        comm.Allreduce(MPI.IN_PLACE, total)
        request.Wait()
        assert out.sum() == BIG
    else:
        comm.Isend(torch.ones(BIG), 0).Wait()
        comm.Allreduce(MPI.IN_PLACE, total)
    assert total.item() == 2
    # Both send first; nobody waits for the other.
    comm.Send(torch.full((BIG,), comm.rank + 1.0), other)
    comm.Recv(out, other)
    assert out[0] == other + 1
    late = comm.irecv(source=other)
    comm.isend({"from": comm.rank}, other).wait()
    assert late.wait() == {"from": other}


@pytest.mark.ranks(2, backend=BACKENDS)
def test_objects_are_received_with_the_arguments_of_mpi4py():
    comm, other = MPI_WORLD, 1 - MPI_WORLD.rank
    for tag in (1, 5):
        comm.send(tag, other, tag)
    status = Status()
    assert comm.recv(None, other, 5, status) == 5
    assert status.Get_tag() == 5
    assert comm.irecv(bytearray(64), other, 1).wait() == 1
    for receive in (comm.recv, comm.irecv):
        with pytest.raises(TypeError, match=r"recv\(source=1\)"):
            receive(1, 5)


@pytest.mark.ranks(2, backend=["shm", "gloo"])  # over MPI: mpi_ranks/verbs.py
def test_a_receive_that_nobody_serves_ends_with_a_report():
    comm = MPICommunication(world(timeout_s=0.5)).Dup()
    if comm.rank == 0:
        request = comm.Irecv(torch.zeros(1), 1)
        with pytest.raises(RankTimeout, match="no message came from rank 1"):
            request.Wait()


@pytest.mark.ranks(2, backend=["shm", "gloo"])
def test_without_mpi_any_source_any_tag_and_synchronous_sends_are_refused_with_a_hint():
    comm, room = MPI_WORLD, torch.zeros(2)
    for call in (
        lambda: comm.Recv(room),
        lambda: comm.irecv(source=MPI.ANY_SOURCE),
        lambda: comm.Recv(room, 0, MPI.ANY_TAG),
        lambda: comm.Ssend(room, 1 - comm.rank),
    ):
        with pytest.raises(MeshError, match=r"mpi4py\.MPI\.COMM_WORLD"):
            call()
    with pytest.raises(UnisonoError, match="65536"):
        comm.Send(room, 1 - comm.rank, tag=1 << 16)


@pytest.mark.ranks([2, 3, 4], backend=BACKENDS)
def test_split_orders_by_key_and_contexts_keep_messages_apart():
    comm = MPI_WORLD
    size, rank = comm.size, comm.rank
    reverse = comm.Split(color=3, key=-rank)
    assert (reverse.rank, reverse.size) == (size - 1 - rank, size)
    ranks = torch.empty(size, dtype=torch.int64)
    reverse.Allgather(torch.tensor([rank]), ranks)
    assert ranks.tolist() == list(range(size))[::-1]
    same = comm.Split(key=5)  # equal keys: old order
    assert (same.rank, same.size) == (rank, size)
    part = comm.Split(MPI.UNDEFINED if rank == 0 else rank % 2)
    if rank == 0:
        assert part.rank is None
        assert part.size is None
        assert part.Get_size() is None
        assert not part.is_distributed()
        with pytest.raises(UnisonoError, match="UNDEFINED"):
            part.Barrier()
    else:
        assert part.size == len([r for r in range(1, size) if r % 2 == rank % 2])
        total = torch.ones(1)
        part.Allreduce(MPI.IN_PLACE, total)
        assert total.item() == part.size
        part.Free()
        with pytest.raises(UnisonoError, match="freed"):
            part.Barrier()
    twin = comm.Dup()
    assert twin.rank == rank
    assert twin != comm
    if rank == 0:
        comm.Send(torch.tensor([1.0]), 1)
        twin.Send(torch.tensor([2.0]), 1)
        same.Send(torch.tensor([3.0]), 1)
    elif rank == 1:
        out = torch.zeros(1)
        for context, value in ((same, 3.0), (twin, 2.0), (comm, 1.0)):
            context.Recv(out, 0)
            assert out.item() == value
    twin.Free()
    assert (MPI_SELF.rank, MPI_SELF.size) == (0, 1)
    alone = torch.ones(1)
    MPI_SELF.Allreduce(MPI.IN_PLACE, alone)
    assert alone.item() == 1


@pytest.mark.ranks([2, 3], backend=BACKENDS)
def test_objects_travel_and_wrong_counts_are_refused_alike_on_all_ranks():
    comm = MPI_WORLD
    size, rank = comm.size, comm.rank
    assert comm.bcast({"from": rank}, root=1) == {"from": 1}
    assert comm.allgather("x" * rank) == ["x" * r for r in range(size)]
    gathered = comm.gather(rank, root=1)
    assert gathered == (list(range(size)) if rank == 1 else None)
    assert comm.scatter([[r] * r for r in range(size)] if rank == 1 else None, 1) == [rank] * rank
    assert comm.allreduce([rank]) == list(range(size))
    assert comm.allreduce(rank, MPI.MAX) == size - 1
    assert comm.allreduce(rank, lambda a, b: a * 10 + b) == int("".join(map(str, range(size))))
    with pytest.raises(ValueError, match=f"1 != {size}"):
        comm.scatter([0] if rank == 0 else None)
    with pytest.raises(ValueError, match="rank 0: 2 != 1"):
        comm.Scatterv(
            (torch.ones(2 * size), [2] * size) if rank == 0 else None, torch.ones(1), root=0
        )
    with pytest.raises(ValueError, match="rank 0: 2 != 1"):
        comm.Gatherv(torch.ones(1), (torch.ones(2 * size), [2] * size) if rank == 0 else None)
    assert comm.allgather(1) == [1] * size  # nobody is left waiting


@pytest.mark.ranks(2, backend=BACKENDS)
def test_several_collectives_under_way_may_be_completed_in_any_order():
    comm = MPI_WORLD
    outs = [torch.zeros(5) for _ in range(4)]
    requests = [
        comm.Iallreduce(torch.full((5,), float(number)), out) for number, out in enumerate(outs)
    ]
    later = torch.zeros(2, 5)
    requests.append(comm.Iallgather(torch.full((1, 5), float(comm.rank)), later))
    requests.append(comm.Iscan(torch.ones(5), torch.zeros(5)))
    give_up = time.monotonic() + 15
    while not requests[2].Test():
        assert time.monotonic() < give_up
        time.sleep(0.001)
    for request in requests[:: -1 if comm.rank else 1]:
        request.Wait()
    assert [out[0].item() for out in outs] == [0, 2, 4, 6]
    assert later[:, 0].tolist() == [0, 1]
