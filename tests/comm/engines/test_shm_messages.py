"""Messages between two ranks: order, tags, sizes beyond a ring of shared memory, no deadlocks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

DEADLINE = {"async_op": False, "timeout_s": 20.0}
BIG = 300_000
"""Elements of a message (float32) that is several times larger than a ring."""


def numbered(rank, peer, n, tag=0):
    return torch.arange(n, dtype=torch.float32) + 1000 * rank + 100 * peer + 10 * tag


@pytest.mark.ranks([2, 4], backend="shm")
def test_exchange_with_everybody_at_once_in_any_size():
    engine = dist.group.WORLD.unisono_engine
    me, peers = engine.rank, [q for q in range(engine.size) if q != engine.rank]
    for n in (1, 16_384, 16_385, BIG):
        sends = [(q, numbered(me, q, n)) for q in peers]
        received = [(q, torch.empty(n)) for q in peers]
        engine.exchange(sends, received, 5, **DEADLINE)
        for q, x in received:
            assert torch.equal(x, numbered(q, me, n))


@pytest.mark.ranks(2, backend="shm")
def test_tags_are_matched_out_of_order_and_equal_tags_in_order():
    rank, peer = dist.get_rank(), 1 - dist.get_rank()
    works = [dist.isend(numbered(rank, peer, 10 + tag, tag), peer, tag=tag) for tag in (1, 2, 3)]
    works += [dist.isend(torch.full((4,), float(i)), peer, tag=9) for i in range(6)]
    for tag in (3, 1, 2):
        x = torch.empty(10 + tag)
        dist.recv(x, peer, tag=tag)
        assert torch.equal(x, numbered(peer, rank, 10 + tag, tag))
    for i in range(6):
        x = torch.empty(4)
        dist.recv(x, peer, tag=9)
        assert x.tolist() == [float(i)] * 4
    for work in works:
        work.wait()


@pytest.mark.ranks(3, backend="shm")
def test_receive_from_anybody_tells_who_sent():
    rank = dist.get_rank()
    if rank:
        dist.send(torch.full((5,), float(rank)), 0, tag=4)
    else:
        seen = []
        for _ in range(2):
            x = torch.empty(5)
            source = dist.recv(x, tag=4)
            assert x.tolist() == [float(source)] * 5
            seen.append(source)
        assert sorted(seen) == [1, 2]


@pytest.mark.ranks(2, backend="shm")
def test_a_large_message_moves_on_while_its_sender_is_in_a_collective():
    rank = dist.get_rank()
    if rank == 0:
        work = dist.isend(numbered(0, 1, BIG), 1)
        dist.all_reduce(torch.ones(3))  # rank 1 comes here only after it has received
        work.wait()
    else:
        x = torch.empty(BIG)
        dist.recv(x, 0)
        dist.all_reduce(torch.ones(3))
        assert torch.equal(x, numbered(0, 1, BIG))


@pytest.mark.ranks(2, backend="shm")
def test_a_large_message_moves_on_while_its_receiver_waits_elsewhere():
    rank = dist.get_rank()
    other = dist.new_group()
    if rank == 0:
        x = torch.empty(BIG)
        work = dist.irecv(x, 1)
        dist.barrier(group=other)  # rank 1 comes here only after its send is complete
        work.wait()
        assert torch.equal(x, numbered(1, 0, BIG))
    else:
        dist.send(numbered(1, 0, BIG), 0)
        dist.barrier(group=other)


@pytest.mark.ranks(2, backend="shm")
def test_messages_into_and_from_strided_and_empty_tensors():
    rank, peer = dist.get_rank(), 1 - dist.get_rank()
    whole = torch.zeros(6, 4)
    work = dist.isend(numbered(rank, peer, 24).view(4, 6).t(), peer)
    dist.recv(whole.t(), peer)
    assert torch.equal(whole.t(), numbered(peer, rank, 24).view(4, 6).t().reshape(4, 6))
    work.wait()
    for request in (dist.isend(torch.empty(0), peer), dist.irecv(torch.empty(0), peer)):
        request.wait()


@pytest.mark.ranks(2, backend="shm")
def test_a_sent_message_outlives_the_group_of_its_sender():
    group = dist.new_group()
    if dist.get_rank() == 0:
        dist.send(torch.arange(100.0), 1, group=group)
        dist.destroy_process_group(group)
        dist.barrier()
    else:
        dist.barrier()
        x = torch.empty(100)
        dist.recv(x, 0, group=group)
        assert x.sum() == 4950
        dist.destroy_process_group(group)
