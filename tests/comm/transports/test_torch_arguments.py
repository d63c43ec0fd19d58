"""What torch.distributed passes on unchecked is refused by our groups, which stay usable."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from unisono.errors import MeshError

on_shm = pytest.mark.ranks(2, backend="shm")


def assert_usable() -> None:
    """Collectives and messages of the world still do what they should."""
    x = torch.ones(2)
    dist.all_reduce(x)
    assert x.tolist() == [2.0, 2.0]
    peer = 1 - dist.get_rank()
    received = torch.empty(2)
    ops = [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, received, peer)]
    for request in dist.batch_isend_irecv(ops):
        request.wait()
    assert received.tolist() == [2.0, 2.0]


@on_shm
@pytest.mark.parametrize("rank", [-1, 2, 99])
def test_a_root_or_peer_that_is_no_rank_is_refused_before_the_call(rank):
    x = torch.tensor([1.0, 2.0])
    calls = {
        "broadcast with src": lambda: dist.broadcast(x, rank),
        "reduce with dst": lambda: dist.reduce(x, rank),
        "gather with dst": lambda: dist.gather(x, None, rank),
        "scatter with src": lambda: dist.scatter(x, None, rank),
        "send with dst": lambda: dist.send(x, rank),
        "recv with src": lambda: dist.recv(x, rank),
    }
    for text, call in calls.items():
        with pytest.raises(MeshError, match=f"{text} {rank}") as caught:
            call()
        assert f"0 <= {rank} < 2 does not hold" in str(caught.value)
    assert x.tolist() == [1.0, 2.0]
    assert_usable()


@pytest.mark.ranks(1, backend="shm")
def test_a_group_of_one_rank_has_root_0_only():
    with pytest.raises(MeshError, match="the group has one rank, 0"):
        dist.broadcast(torch.ones(1), 1)
