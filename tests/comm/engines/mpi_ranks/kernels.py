"""Kernels where MPI differs: pieces, lone blocks, scattered memory, its own reductions."""

from __future__ import annotations

import torch
import torch.distributed as dist

DEADLINE = {"async_op": False, "timeout_s": 20.0}
LARGE = 700_001
"""Elements (float32) of a block that is above one megabyte and travels alone."""


def engine():
    return dist.group.WORLD.unisono_engine


def block(rank, n, dtype=torch.float32):
    return ((torch.arange(n) * 7 + rank * 3) % 5).to(dtype)


def check_large_and_empty_blocks_of_all_moves_whole_and_in_pieces():
    e = engine()
    me, others = e.rank, [q for q in range(e.size) if q != e.rank]
    for pieces in (None, 400_000):
        before = e.channel.chunk_bytes
        e.channel.chunk_bytes = pieces or before
        sizes = [LARGE if r == 1 else 0 if r == 2 else 5 for r in range(e.size)]
        x, expected = block(me, sizes[me]), [block(r, n) for r, n in enumerate(sizes)]
        outs = [torch.empty(n) for n in sizes]
        e.all_gather(outs, x, **DEADLINE)
        assert all(map(torch.equal, outs, expected))
        for root in range(e.size):
            outs = [torch.empty(n) for n in sizes] if root == me else None
            e.gather(outs, x, root, **DEADLINE)
            assert outs is None or all(map(torch.equal, outs, expected))
            out = torch.empty(sizes[me])
            e.scatter(out, expected if root == me else None, root, **DEADLINE)
            assert torch.equal(out, expected[me])
        y = block(me, LARGE)
        e.broadcast_(y, 1, **DEADLINE)
        assert torch.equal(y, block(1, LARGE))
        ins = [block(me + 5 * q, sizes[(me + q) % e.size]) for q in range(e.size)]
        outs = [torch.empty(sizes[(me + q) % e.size]) for q in range(e.size)]
        e.all_to_all(outs, ins, **DEADLINE)
        for q, out in enumerate(outs):
            assert torch.equal(out, block(q + 5 * me, sizes[(me + q) % e.size]))
        received = [(q, torch.empty(LARGE)) for q in others]
        e.exchange([(q, block(me + q, LARGE)) for q in others], received, 3, **DEADLINE)
        assert all(torch.equal(z, block(q + me, LARGE)) for q, z in received)
        e.channel.chunk_bytes = before


def check_a_gather_into_a_slice_of_its_own_output():
    e = engine()
    for n in (3, LARGE):
        whole = torch.zeros(e.size * n)
        pieces = list(whole.split(n))
        pieces[e.rank].copy_(block(e.rank, n))
        e.all_gather(pieces, pieces[e.rank], **DEADLINE)
        assert torch.equal(whole, torch.cat([block(r, n) for r in range(e.size)]))


def check_a_value_that_is_no_number_wins_on_all_ranks():
    e = engine()
    for op in ("min", "max"):
        for n in (5, LARGE):
            x = torch.full((n,), float("nan") if e.rank == e.size - 1 else float(e.rank))
            e.all_reduce_(x, op, **DEADLINE)
            assert bool(x.isnan().all())
